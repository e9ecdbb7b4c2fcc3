"""The policies ``cannikin`` and ``adaptdl`` choose the global batch, and the learning rate follows it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.adapt.adaptation import Adaptation
from planner.check import check_plan
from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.files.scenario import scenario_schema
from planner.plan.plan import Plan, samples_before
from planner.runs.metrics import measure, trained_samples
from planner.runs.record import RunRecord
from planner.scenario.effects import ComputeEffects, Effects, Straggler
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import (
    RATE_RULES,
    BatchLimits,
    LearningRateSchedule,
    Optimizer,
    Training,
    rate_factor,
    statistical_efficiency,
)
from planner.systems.cannikin.policy import AdaptdlPolicy, CannikinPolicy, LbBspPolicy
from planner.systems.cannikin.strategy import adaptdl
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario
from traces.common.errors import InputError

FIRST, LARGEST = 60, 960


def unequal_devices(noise: tuple[tuple[float, float], ...], rule: str = "adascale") -> Scenario:
    """Three devices, of which one takes 1.5 times and one twice as long; a step has a fixed part."""
    scenario = mesh_scenario(
        3, [1e-3], [2e-3], parameter_bytes=[1_000_000], link=lambda a, b: (1e12, 0.0), global_batch=FIRST
    )
    (layer,) = scenario.model.layers
    # 4 ms and 0.2 ms for each sample, so that larger batches are quicker by sample.
    table = TimeTable((1, 1000), (1.4e-3, 68e-3), (1.4e-3, 68e-3), (1.4e-3, 68e-3))
    times = dict.fromkeys(layer.times, table)
    model = replace(scenario.model, layers=(replace(layer, times=times),))
    training = replace(scenario.training, batch=BatchLimits(FIRST, LARGEST, rule, noise))
    slow = (Straggler("device-1", 1.5), Straggler("device-2", 2.0))
    return replace(scenario, model=model, training=training, effects=Effects(compute=ComputeEffects(stragglers=slow)))


def run(scenario: Scenario, policy: type[CannikinPolicy], steps: int = 60) -> RunRecord:
    return Simulator().run(scenario, adaptdl(scenario), policy(scenario), steps)


def last_plan(record: RunRecord) -> Plan:
    return record.decisions[-1].plan if record.decisions else record.plan


def test_noise_makes_the_batch_grow_and_its_absence_keeps_it() -> None:
    noisy = run(unequal_devices(((0, 5000.0),)), CannikinPolicy)
    assert last_plan(noisy).global_batch > 4 * FIRST
    for decision in noisy.decisions:
        check_plan(decision.plan, noisy.scenario)
    assert any(f"global batch {FIRST} -> " in decision.change for decision in noisy.decisions)
    quiet = run(unequal_devices(((0, 0.5),)), CannikinPolicy)
    assert last_plan(quiet).global_batch < 1.3 * FIRST
    unknown = run(unequal_devices(()), CannikinPolicy)
    assert {decision.plan.global_batch for decision in unknown.decisions} == {FIRST}


def test_the_batch_follows_noise_that_rises_with_the_samples() -> None:
    record = run(unequal_devices(((0, 1.0), (3000, 1.0), (6000, 20_000.0))), CannikinPolicy, 150)
    samples = record.metrics["samples"].tolist()
    assert max(samples[:50]) < 1.3 * FIRST
    assert samples[-1] > 4 * FIRST


def test_cannikin_is_quicker_than_even_shares_which_are_quicker_than_a_small_batch() -> None:
    scenario = unequal_devices(((0, 20_000.0),))

    def goodput(policy: type[CannikinPolicy]) -> float:
        """Progress in samples of the first batch, per second, over the last steps of a run."""
        table = run(scenario, policy, 80).metrics.iloc[-20:]
        gained = sum(each * statistical_efficiency(each, FIRST, 20_000.0) for each in table["samples"])
        return gained / table["step_s"].sum()

    balanced, even, fixed = goodput(CannikinPolicy), goodput(AdaptdlPolicy), goodput(LbBspPolicy)
    assert balanced > 1.2 * even
    assert even > 1.1 * fixed


def test_even_shares_stay_even_and_lb_bsp_keeps_the_batch() -> None:
    scenario = unequal_devices(((0, 3000.0),))
    for decision in run(scenario, AdaptdlPolicy).decisions:
        shares = [replica.share for replica in decision.plan.replicas]
        assert max(shares) - min(shares) <= 1
    balanced = run(scenario, LbBspPolicy)
    assert {decision.plan.global_batch for decision in balanced.decisions} == {FIRST}
    assert last_plan(balanced).replicas[0].share > 2 * last_plan(balanced).replicas[2].share


def test_the_metrics_count_the_samples_and_tell_the_learning_rate() -> None:
    record = run(unequal_devices(((0, 5000.0),)), CannikinPolicy)
    metrics, table = measure(record), record.metrics
    batches = [record.plan.global_batch] * len(table)
    for decision in record.decisions:
        batches[decision.first_step :] = [decision.plan.global_batch] * (len(table) - decision.first_step)
    assert table["samples"].tolist() == batches
    assert trained_samples(record) == sum(batches)
    rest_s = table["end_s"].iloc[-1] - table["end_s"].iloc[0]
    assert metrics.samples_per_s == pytest.approx(sum(batches[1:]) / rest_s)
    plan, rate = last_plan(record), record.scenario.training.optimizer.learning_rate
    scale, noise = plan.global_batch / FIRST, 5000.0 / FIRST
    assert table["learning_rate"].iloc[0] == rate
    assert table["learning_rate"].iloc[-1] == pytest.approx(rate * (noise + 1) / (noise / scale + 1))


def test_a_run_can_be_replayed() -> None:
    record = run(unequal_devices(((0, 5000.0),)), CannikinPolicy, 40)
    replay = Adaptation(CannikinPolicy(record.scenario), record.plan, record.scenario)
    for step in range(40):
        replay.finish_step(step, record.events)
    assert replay.decisions == list(record.decisions)


# --- The learning rate -----------------------------------------------------------------------------------------


@given(st.sampled_from(RATE_RULES), st.integers(1, 500), st.integers(1, 500), st.floats(1e-3, 1e6))
def test_the_factor_is_between_none_and_that_of_the_batch(rule: str, batch: int, first: int, noise: float) -> None:
    factor, scale = rate_factor(rule, batch, first, noise), batch / first
    assert min(1, scale) - 1e-9 <= factor <= max(1, scale) + 1e-9
    # The gain of AdaScale by its own formula: var = N / B_0 and sqr = 1.
    variance = noise / first
    gain = (variance + 1) / (variance / scale + 1)
    assert factor == pytest.approx({"linear": scale, "sqrt": scale**0.5, "adascale": gain}[rule])


def test_the_schedule_counts_steps_of_the_global_batch() -> None:
    schedule = LearningRateSchedule("linear", warmup_steps=2, decay_steps=10)
    training = Training(32, optimizer=Optimizer("sgd", 0.5, schedule=schedule), batch=BatchLimits(8, 128, "linear"))
    for step in range(15):
        assert training.learning_rate(32 * step, 32, None) == 0.5 * schedule.factor(step)
    assert training.learning_rate(32 * 7, 64, None) == 2 * training.learning_rate(32 * 7, 32, None)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=6), st.integers(0, 30))
def test_samples_before_a_step_are_those_of_each_step_before(changes: list[tuple[int, int]], step: int) -> None:
    scenario = unequal_devices(())
    first = adaptdl(scenario)

    def with_batch(samples: int) -> Plan:
        return replace(first, pipelines=(replace(first.pipelines[0], microbatches=(samples,)),))

    timeline = [(0, with_batch(10)), *((at, with_batch(samples)) for at, samples in changes)]
    batches = [next(plan for at, plan in reversed(timeline) if at <= each).global_batch for each in range(step)]
    assert samples_before(step, timeline) == sum(batches)


# --- Scenarios and plans ---------------------------------------------------------------------------------------


@given(
    limits=st.none()
    | st.builds(
        BatchLimits,
        st.integers(1, 9),
        st.integers(9, 10**6),
        st.sampled_from(RATE_RULES),
        st.dictionaries(st.floats(0, 1e9), st.floats(1e-3, 1e9), max_size=3).map(
            lambda each: tuple(sorted(each.items()))
        ),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_limits_are_kept_in_a_resolved_scenario(limits: BatchLimits | None, tmp_path: Path) -> None:
    scenario = unequal_devices(())
    scenario = replace(scenario, training=replace(scenario.training, batch=limits))
    write_resolved_scenario(scenario, tmp_path / "scenario.json")
    assert read_resolved_scenario(tmp_path / "scenario.json").training == scenario.training


def test_the_keys_are_those_of_the_schema() -> None:
    assert set(scenario_schema()["$defs"]["BatchEntry"]["properties"]) == {"from", "to", "learning_rate", "noise_scale"}


def test_an_assumed_noise_scale_is_linear_between_points() -> None:
    limits = BatchLimits(1, 2, "sqrt", ((10, 5.0), (20, 15.0)))
    assert [limits.assumed_noise_scale(each) for each in (0, 10, 16, 20, 99)] == [5.0, 5.0, 11.0, 15.0, 15.0]


@pytest.mark.parametrize(
    ("batch", "noise", "expected"),
    [
        (LARGEST, None, "the rule 'adascale' needs the gradient noise scale"),
        (LARGEST + 1, 5.0, f"allows global batches from {FIRST} to {LARGEST}"),
        (FIRST, -1.0, "a noise scale of -1 samples is not allowed"),
    ],
)
def test_what_a_plan_may_not_have(batch: int, noise: float | None, expected: str) -> None:
    scenario = unequal_devices(())
    plan = adaptdl(scenario)
    changed = replace(plan, pipelines=(replace(plan.pipelines[0], microbatches=(batch,)),), noise_scale=noise)
    with pytest.raises(InputError, match=expected):
        check_plan(changed, scenario)
    alone = replace(scenario, training=replace(scenario.training, batch=None))
    if batch != FIRST:
        with pytest.raises(InputError, match=f"trains with a global batch of {FIRST}"):
            check_plan(changed, alone)
