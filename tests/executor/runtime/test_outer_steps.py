"""DiLoCo and Streaming DiLoCo: against training in one process, and where they must equal other methods."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.recovery.claim import resumption
from executor.recovery.export import newest_parameters, parameters_by_step
from planner.adapt import thinking
from planner.check import check_plan
from planner.events.event import UPDATE_ACTION, EventKind
from planner.plan.outer_step import EXCHANGES, OUTER_COMPRESSIONS, PATTERNS, OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.record import RunRecord
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from sim.simulator import Simulator
from tests.executor.runtime.test_asynchronous import versions
from tests.helpers.processes.separate import Separate, train_separately
from tests.helpers.processes.training import MODELS, hybrid_plan, train_in_one_process, training_scenario
from tests.helpers.strategies.manual_transport import Pipelines
from tests.helpers.strategies.scripted_policy import Scripted
from tests.sim.test_outer_steps import regions as timed_regions

CODE = ModelCode(MODELS / "digits.py", {"width": 8, "depth": 3})
LAYERS = 4
TOLERANCE = 1e-6

OPTIMIZERS = (Optimizer("sgd", 0.2), Optimizer("momentum", 0.05), Optimizer("adamw", 0.01))


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """Real decisions take effect at the steps that are expected, even if the machine is busy for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinking, "LONGEST_WAIT_S", 60.0)
        yield


def scenario_of(devices: int, optimizer: Optimizer = OPTIMIZERS[0], clip_norm: float | None = None) -> Scenario:
    regions = [f"region-{index}" for index in range(devices)]
    scenario = training_scenario(CODE, devices, optimizer=optimizer, regions=regions)
    assert len(scenario.model.layers) == LAYERS
    return replace(scenario, training=replace(scenario.training, clip_norm=clip_norm))


def separate(scenario: Scenario, samples: Sequence[int], every: int, outer: OuterStep, method: str = "") -> Plan:
    """A device for each pipeline, of which the second has two stages; streaming unless a method is given."""
    pipelines = []
    for index, (device, count) in enumerate(zip(scenario.cluster.devices, samples, strict=True)):
        cuts = [(0, 1), (1, LAYERS)] if index == 1 else [(0, LAYERS)]
        stages = tuple(Stage(first, end, (Replica(device.name),), 2) for first, end in cuts)
        pipelines.append(Pipeline(stages, (count - 1, 1)))
    how = Synchronisation(method or "diloco-streaming", interval_steps=every, outer=outer)
    plan = Plan(scenario.name, scenario.model.name, "hand", "compact-zb", tuple(pipelines), synchronisation=how)
    check_plan(plan, scenario)
    return plan


def trained(scenario: Scenario, plan: Plan, steps: int, delays: Sequence[int] = ()) -> list[dict[str, torch.Tensor]]:
    """Let pipelines take their steps in turn; the messages of step n arrive ``delays[n]`` steps later, then all."""
    pipelines = Pipelines(scenario, plan, steps)
    for step in range(steps):
        for p in range(len(plan.pipelines)):
            pipelines.step(p)
        if not delays or any(sent + delay == step for sent, delay in enumerate(delays[: step + 1])):
            pipelines.network.deliver_all()
    pipelines.finish()
    return [dict(compute.named_parameters()) for compute in pipelines.computes]


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@st.composite
def streams(draw: st.DrawFn, most_steps: int = 5) -> tuple[int, OuterStep]:
    every = draw(st.integers(1, most_steps))
    outer = OuterStep(
        learning_rate=draw(st.sampled_from([0.3, 0.7, 1.0])),
        momentum=draw(st.sampled_from([0.0, 0.5, 0.9])),
        fragments=draw(st.integers(1, min(LAYERS, every))),
        pattern=draw(st.sampled_from(PATTERNS)),
        overlap_steps=draw(st.integers(0, every - 1)),
        mixing=draw(st.sampled_from([0.0, 0.25, 0.5])),
        exchange=draw(st.sampled_from(EXCHANGES)),
    )
    return every, outer


@st.composite
def compressed(draw: st.DrawFn) -> OuterStep:
    density = draw(st.sampled_from([1.0, 0.1]))
    return OuterStep(
        momentum=draw(st.sampled_from([0.0, 0.9])),
        compression=draw(st.sampled_from(OUTER_COMPRESSIONS)),
        density=density,
        feedback=draw(st.sampled_from([1.0, 0.95])),
        exchange=draw(st.sampled_from(EXCHANGES if density == 1 else ("allgather",))),
    )


# --- in one process ---------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(data=st.data())
def test_any_settings_follow_training_in_one_process(data: st.DataObject) -> None:
    samples = data.draw(st.sampled_from([(12,), (6, 6), (9, 3), (5, 3, 4)]))
    every, outer = data.draw(streams())
    optimizer = data.draw(st.sampled_from(OPTIMIZERS))
    clip_norm = data.draw(st.sampled_from([None, 0.05]))
    steps = data.draw(st.integers(1, 9))
    delays = data.draw(st.lists(st.integers(0, outer.overlap_steps), min_size=steps, max_size=steps))
    scenario = scenario_of(len(samples), optimizer, clip_norm)
    plan = separate(scenario, samples, every, outer)
    expected = train_separately(scenario, plan, steps)
    for found, parameters in zip(trained(scenario, plan, steps, delays), expected.parameters, strict=True):
        torch.testing.assert_close(found, dict(parameters), rtol=1e-5, atol=TOLERANCE)


@given(compressed(), st.integers(1, 3), st.sampled_from([(6, 6), (5, 3, 4)]))
@settings(max_examples=10)
def test_all_pipelines_have_the_same_parameters_after_an_outer_step(
    outer: OuterStep, every: int, samples: tuple[int, ...]
) -> None:
    """To the bit, since each pipeline computes the outer step itself, from the same compressed values."""
    scenario = scenario_of(len(samples), OPTIMIZERS[2])
    first, *others = trained(scenario, separate(scenario, samples, every, outer, "diloco"), 2 * every)
    for other in others:
        assert_equal(other, first)


@pytest.mark.parametrize("samples", [(6, 6), (5, 3, 4), (4, 4, 2, 2)])
def test_means_of_parts_are_those_of_the_whole(samples: tuple[int, ...]) -> None:
    """To the bit, since both are summed in the same order."""
    scenario = scenario_of(len(samples), OPTIMIZERS[2])
    outer = OuterStep(fragments=2, overlap_steps=1, mixing=0.5)
    both = [
        trained(scenario, separate(scenario, samples, 3, replace(outer, exchange=exchange)), 8)
        for exchange in EXCHANGES
    ]
    for whole, parts in zip(*both, strict=True):
        assert_equal(parts, whole)


def test_exchanging_every_step_is_averaging_gradients() -> None:
    """H = 1 and plain SGD inside, an outer learning rate of 1 without momentum; the weights are the samples."""
    scenario = scenario_of(3)
    plan = separate(scenario, (5, 3, 4), 1, OuterStep(1.0, 0.0), "diloco")
    expected = train_in_one_process(scenario, 6)
    for found in trained(scenario, plan, 6):
        assert_near(found, dict(expected.parameters))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("every", [1, 3])
def test_a_single_pipeline_trains_as_if_it_took_no_outer_steps(optimizer: Optimizer, every: int) -> None:
    scenario = scenario_of(1, optimizer)
    plan = separate(scenario, (12,), every, OuterStep(1.0, 0.0), "diloco")
    assert_near(trained(scenario, plan, 7)[0], dict(train_in_one_process(scenario, 7).parameters))


def test_without_outer_optimizer_it_is_averaging_parameters() -> None:
    scenario = scenario_of(2, OPTIMIZERS[1])
    plan = separate(scenario, (6, 6), 3, OuterStep(1.0, 0.0), "diloco")
    averaged = replace(plan, synchronisation=Synchronisation("ma", interval_steps=3, staleness_bound=0))
    for found, expected in zip(trained(scenario, plan, 6), trained(scenario, averaged, 6), strict=True):
        assert_near(found, expected)


def test_streaming_the_whole_model_without_overlap_is_diloco() -> None:
    scenario = scenario_of(2, OPTIMIZERS[2])
    both = [trained(scenario, separate(scenario, (7, 5), 3, OuterStep(), method), 8) for method in ("diloco", "")]
    for one, other in zip(*both, strict=True):
        assert_equal(one, other)


# --- in real processes ------------------------------------------------------------------------------------------


def hybrid(every: int, outer: OuterStep) -> tuple[Scenario, Plan]:
    """A pipeline of two stages, the first one on two devices, beside a device that trains alone."""
    scenario = scenario_of(4, OPTIMIZERS[2])
    plan = hybrid_plan(scenario, "1f1b", [([(1, [1.0, 2.0]), (3, [1.0])], [4, 2]), ([(4, [1.0])], [6])])
    how = Synchronisation("diloco-streaming", interval_steps=every, outer=outer)
    return scenario, replace(plan, synchronisation=how)


def run(
    scenario: Scenario, plan: Plan, folder: Path, steps: int, checkpoints: CheckpointConfig | None = None
) -> tuple[RunRecord, dict[str, torch.Tensor]]:
    """The record, and the parameters that the run has written."""
    target = folder / "parameters.safetensors"
    record = TorchBackend("real", parameters=target, checkpoints=checkpoints).run(scenario, plan, None, steps)
    return record, load_file(target)


@pytest.mark.parametrize(
    ("every", "outer"),
    [
        (2, OuterStep()),
        (4, OuterStep(fragments=3, pattern="strided", overlap_steps=2, mixing=0.5)),
        (3, OuterStep(fragments=2, overlap_steps=1, exchange="reduce-scatter")),
    ],
    ids=["at-once", "streaming", "reduce-scatter"],
)
def test_replicas_and_stages_form_a_worker(every: int, outer: OuterStep, tmp_path: Path) -> None:
    scenario, plan = hybrid(every, outer)
    record, parameters = run(scenario, plan, tmp_path, 9)
    expected = train_separately(scenario, plan, 9)
    assert record.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(parameters, mean_of(expected), rtol=1e-5, atol=TOLERANCE)


def mean_of(trained: Separate) -> dict[str, torch.Tensor]:
    """The mean of the two pipelines, which have equally many samples."""
    one, other = trained.parameters
    return {name: (value + other[name]) / 2 for name, value in one.items()}


def test_each_checkpoint_has_the_parameters_of_all_workers(tmp_path: Path) -> None:
    """No exchange is under way after steps 3 and 5; what is exported is the mean."""
    scenario, plan = hybrid(2, OuterStep())
    run(scenario, plan, tmp_path, 5, CheckpointConfig(tmp_path / "checkpoints", 3))
    stored = {each.step: each for each in parameters_by_step(tmp_path / "checkpoints", scenario)}
    assert stored.keys() == {3, 5}
    for step, each in stored.items():
        expected = train_separately(scenario, plan, step)
        for own, parameters in zip(each.own, expected.parameters, strict=True):
            torch.testing.assert_close(own, dict(parameters), rtol=1e-5, atol=TOLERANCE)
        torch.testing.assert_close(each.mean, mean_of(expected), rtol=1e-5, atol=TOLERANCE)
    assert_equal(newest_parameters(tmp_path / "checkpoints", scenario)[1], stored[5].mean)


def rented(plan: Plan, *names: tuple[str, ...]) -> Plan:
    """The plan with these devices as the replicas of each pipeline's only stage."""
    pipelines = [
        replace(pipeline, stages=(replace(pipeline.stages[0], replicas=tuple(map(Replica, own))),))
        for pipeline, own in zip(plan.pipelines, names, strict=True)
    ]
    return replace(plan, pipelines=tuple(pipelines))


def test_replicas_come_and_go_between_outer_steps(tmp_path: Path) -> None:
    """A device joins the first worker, and goes to the second one while pseudo-gradients are under way."""
    scenario = scenario_of(3, OPTIMIZERS[1])
    plan = hybrid_plan(scenario, "1f1b", [([(LAYERS, [1.0])], [4, 2]), ([(LAYERS, [1.0])], [6])])
    outer = OuterStep(fragments=2, overlap_steps=2)
    plan = replace(plan, synchronisation=Synchronisation("diloco-streaming", interval_steps=4, outer=outer))
    later = {
        1: rented(plan, ("device-0", "device-2"), ("device-1",)),
        4: rented(plan, ("device-0",), ("device-1", "device-2")),
    }
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, Scripted(later), 9)
    assert [decision.first_step for decision in record.decisions] == [3, 6]
    expected = train_separately(scenario, plan, 9)
    assert record.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(load_file(target), mean_of(expected), rtol=1e-5, atol=TOLERANCE)


def test_the_settings_of_exchanges_change_between_two_steps(tmp_path: Path) -> None:
    """Outer steps that are under way are taken first; the simulator sends the same messages, also with replicas."""
    scenario, plan = hybrid(4, OuterStep(fragments=2, pattern="strided", overlap_steps=2, mixing=0.5))
    later = {
        3: changed(plan, 2, overlap_steps=0, fragments=1, exchange="reduce-scatter"),
        6: changed(plan, 6, overlap_steps=2, fragments=3, learning_rate=0.5, momentum=0.8),
        11: changed(plan, 3, overlap_steps=1, pattern="sequential"),
    }
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, Scripted(later), 18)
    firsts = [decision.first_step for decision in record.decisions]
    assert firsts == [5, 8, 13]
    expected = train_separately(scenario, plan, 18, dict(zip(firsts, later.values(), strict=True)))
    assert record.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(load_file(target), mean_of(expected), rtol=1e-5, atol=TOLERANCE)
    simulated = Simulator().run(scenario, plan, Scripted(later), 18)
    assert updates_sent(record) == updates_sent(simulated)
    # After every 4th step, from step 5 on every 2nd, from 8 on every 6th, from 13 on every 3rd; of each fragment.
    assert {step for *_, step, _ in updates_sent(record)} == {1, 3} | {5, 7} | {9, 11} | {14, 15, 17}


def changed(plan: Plan, every: int, **outer: Any) -> Plan:
    """The plan with another interval and other settings of the outer step."""
    how = replace(plan.synchronisation, interval_steps=every)
    return replace(plan, synchronisation=replace(how, outer=replace(how.outer, **outer)))


def updates_sent(record: RunRecord) -> list[tuple[str, str | None, int, int]]:
    """The messages with pseudo-gradients, in the order of each pair of devices."""
    found = [
        (event.device, event.peer, event.step, event.size_bytes)
        for event in record.events
        if event.kind is EventKind.SEND and event.action == UPDATE_ACTION
    ]
    return sorted(found, key=lambda each: each[:2])


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_updates_around_a_change_are_as_stale_as_in_the_simulator(exchange: str) -> None:
    """Steps take 0.4 s; updates arrive 0.2 and 0.3 s after one, or their parts after 0.125 and 0.175 s, as do means."""
    outer = OuterStep(fragments=2, pattern="strided", overlap_steps=1, exchange=exchange)
    scenario, plan = timed_regions([0.4, 0.4], [0.15, 0.25], 4, outer, 0.05)
    later = {3: changed(plan, 6, fragments=1, overlap_steps=2), 9: changed(plan, 2)}
    simulated = Simulator().run(scenario, plan, Scripted(later), 16)
    real = TorchBackend("paced", emulator="shaper").run(scenario, plan, Scripted(later), 16)
    assert versions(real.events) == versions(simulated.events)


@pytest.mark.slow
@pytest.mark.parametrize(("joins", "changes"), [((1, 6), 1), ((4, 6), 1), ((4, 6), 4), ((1, 7), 5)])
def test_a_replica_that_comes_later_knows_the_exchanges(joins: tuple[int, int], changes: int, tmp_path: Path) -> None:
    """A device joins the first worker after, in and before the step with which the exchanges change, and leaves it."""
    scenario = scenario_of(3, OPTIMIZERS[1])
    plan = hybrid_plan(scenario, "1f1b", [([(LAYERS, [1.0])], [4, 2]), ([(LAYERS, [1.0])], [6])])
    outer = OuterStep(fragments=2, overlap_steps=2)
    plan = replace(plan, synchronisation=Synchronisation("diloco-streaming", interval_steps=4, outer=outer))
    later, present = {}, plan
    for step in sorted({*joins, changes}):
        if step == changes:
            present = replace(present, synchronisation=changed(plan, 3, fragments=3, overlap_steps=1).synchronisation)
        if step in joins:
            first = ("device-0", "device-2") if step == joins[0] else ("device-0",)
            present = replace(rented(plan, first, ("device-1",)), synchronisation=present.synchronisation)
        later[step] = present
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, Scripted(later), 14)
    expected = train_separately(
        scenario, plan, 14, {changes + 2: replace(plan, synchronisation=present.synchronisation)}
    )
    assert record.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(load_file(target), mean_of(expected), rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("step", [5, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compression", ["none", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_a_checkpoint_after_its_exchanges_changed(
    step: int, compression: str, tmp_path: Path
) -> None:
    """Also from the step with which they change, before which outer steps are under way."""
    scenario, plan = hybrid(4, OuterStep(fragments=2, overlap_steps=2, mixing=0.5, compression="int4", density=0.5))
    folder, target = tmp_path / "checkpoints", tmp_path / "parameters.safetensors"
    checkpoints = CheckpointConfig(folder, 1, kept=12)
    backend = TorchBackend("real", parameters=target, checkpoints=checkpoints)
    later = changed(plan, 3, overlap_steps=1, fragments=3, compression=compression, density=1.0)
    whole = backend.run(scenario, plan, Scripted({3: later}), 11)
    assert [decision.first_step for decision in whole.decisions] == [5]
    expected = load_file(target)
    for newer in (each for each in folder.glob("**/step-*") if int(each.name[5:]) > step):
        shutil.rmtree(newer)
    assert resumption(folder, scenario, 11, print) == (step, later)
    rest, found = run(scenario, later, tmp_path, 11, CheckpointConfig(folder, 3, step))
    assert rest.losses == whole.losses[step:]
    assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("first_steps", [5, 6])
@pytest.mark.parametrize(
    "how",
    [pytest.param({"density": 0.5}, marks=pytest.mark.slow), {"exchange": "reduce-scatter"}],
    ids=["sparse", "reduce-scatter"],
)
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    first_steps: int, how: dict[str, Any], tmp_path: Path
) -> None:
    """Also with pseudo-gradients under way: pipelines keep their own optimizers' states, and outer steps their time."""
    scenario, plan = hybrid(4, OuterStep(fragments=2, overlap_steps=2, mixing=0.5, compression="int4", **how))
    whole, expected = run(scenario, plan, tmp_path, 11)
    folder = tmp_path / "checkpoints"
    first, _ = run(scenario, plan, tmp_path, first_steps, CheckpointConfig(folder, 3))
    assert resumption(folder, scenario, 11, print) == (first_steps, plan)
    rest, found = run(scenario, plan, tmp_path, 11, CheckpointConfig(folder, 3, first_steps))
    assert (*first.losses, *rest.losses) == whole.losses
    assert_equal(found, expected)
