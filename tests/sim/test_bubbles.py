"""How much of its devices' time each published schedule leaves idle, as its docstring says, measured from a run.

P workers with stages that take equally long, M microbatches, transfers that take no time.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.metrics import Metrics, measure
from planner.scenario.profile import ModelProfile, TimeTable
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario

EXACT = 1e-9
WORKERS = st.integers(1, 5)
MICROBATCHES = st.integers(1, 12)
TIMES_S = st.floats(1e-2, 10)
MANY = settings(max_examples=60)


def measured(
    schedule: str,
    workers: int,
    microbatches: int,
    times_s: tuple[float, float, float],
    *,
    rounds: int = 1,
    back: bool = False,
    steps: int = 1,
) -> Metrics:
    """A run in which every stage's F, I and W take so long; stages go round the workers, or down and back up."""
    stages = workers * rounds
    scenario = mesh_scenario(
        workers,
        [1.0] * stages,
        [1.0] * stages,
        output_bytes=[0] * stages,
        parameter_bytes=[0] * stages,
        global_batch=microbatches,
    )
    forward_s, input_s, weight_s = times_s
    table = TimeTable((1,), (forward_s,), (input_s,), (weight_s,))
    layers = tuple(replace(layer, times={"kind": table}) for layer in scenario.model.layers)
    scenario = replace(scenario, model=ModelProfile("mesh", layers))
    ring = [*range(workers), *reversed(range(workers))] if back else list(range(workers))
    # 1F1B holds what it needs to keep the next stages busy; what the others hold is their own affair.
    made = tuple(
        Stage(
            stage,
            stage + 1,
            (Replica(f"device-{ring[stage % len(ring)]}"),),
            workers - stage if schedule == "1f1b" else microbatches,
        )
        for stage in range(stages)
    )
    plan = Plan("mesh", "mesh", "hand", schedule, (Pipeline(made, (1,) * microbatches),))
    return measure(Simulator().run(scenario, plan, None, steps))


@MANY
@given(st.sampled_from(["gpipe", "1f1b"]), WORKERS, MICROBATCHES, TIMES_S, TIMES_S, st.integers(1, 3))
def test_gpipe_and_1f1b_idle_while_the_pipeline_fills_and_drains_in_every_step(
    schedule: str, workers: int, microbatches: int, forward_s: float, backward_s: float, steps: int
) -> None:
    times_s = (forward_s, backward_s / 2, backward_s / 2)
    expected = (workers - 1) / (microbatches + workers - 1)
    found = measured(schedule, workers, microbatches, times_s, steps=steps)
    assert found.bubble_ratio == pytest.approx(expected, rel=EXACT, abs=EXACT)
    # Each device is as idle as all of them.
    assert list(found.utilisation.values()) == pytest.approx([1 - expected] * workers, rel=EXACT)


@MANY
@given(WORKERS, st.integers(1, 3), st.integers(1, 3), TIMES_S, TIMES_S)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_worker(
    workers: int, rounds: int, groups: int, forward_s: float, backward_s: float
) -> None:
    # With P dividing M. Idle over busy is (P - 1) / M for 1F1B.
    times_s = (forward_s, backward_s / 2, backward_s / 2)
    microbatches = groups * workers
    found = measured("interleaved-1f1b", workers, microbatches, times_s, rounds=rounds).bubble_ratio
    assert found / (1 - found) == pytest.approx((workers - 1) / microbatches / rounds, rel=EXACT, abs=EXACT)


@MANY
@given(WORKERS, MICROBATCHES, TIMES_S, TIMES_S, TIMES_S)
def test_zb_h1_fills_the_bubble_with_weight_gradients(
    workers: int, more: int, forward_s: float, input_s: float, weight_s: float
) -> None:
    # With M >= P. The formula of the paper, (P - 1)(F + I - W), is for W that fits where F and I leave room; of a
    # longer one as much is gained as the shorter of these two.
    microbatches, times_s = workers - 1 + more, (forward_s, input_s, weight_s)
    idle_s = (workers - 1) * (forward_s + input_s - min(times_s))
    expected = idle_s / (idle_s + microbatches * sum(times_s))
    found = measured("zb-h1", workers, microbatches, times_s).bubble_ratio
    assert found == pytest.approx(expected, rel=EXACT, abs=EXACT)


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b() -> None:
    idle_over_busy = []
    for schedule in ("1f1b", "zb-h1"):
        bubble = measured(schedule, 4, 8, (1.0, 1.0, 1.0)).bubble_ratio
        idle_over_busy.append(bubble / (1 - bubble))
    assert idle_over_busy == pytest.approx([3 / 8, 3 / 8 / 3], rel=EXACT)


@MANY
@given(st.sampled_from([("zb-h2", 1), ("zb-v", 2)]), st.integers(1, 4), st.integers(0, 6), TIMES_S, st.integers(1, 3))
def test_zb_h2_and_zb_v_idle_only_until_the_first_activation_comes(
    case: tuple[str, int], workers: int, more: int, unit_s: float, steps: int
) -> None:
    # F = I = W and M >= 2P - 1. Since no device waits for another one's step, the next step does not idle again.
    schedule, rounds = case
    microbatches = 2 * workers - 1 + more
    times_s = (unit_s, unit_s, unit_s)
    found = measured(schedule, workers, microbatches, times_s, rounds=rounds, back=rounds == 2, steps=steps)
    expected = (workers - 1) / (workers - 1 + 3 * rounds * microbatches * steps)
    assert found.bubble_ratio == pytest.approx(expected, rel=EXACT, abs=EXACT)


@settings(max_examples=20)
@given(WORKERS, st.integers(1, 6), TIMES_S, TIMES_S)
def test_no_schedule_idles_more_than_gpipe(
    workers: int, microbatches: int, forward_s: float, backward_s: float
) -> None:
    times_s = (forward_s, backward_s / 2, backward_s / 2)
    most = measured("gpipe", workers, microbatches, times_s).bubble_ratio
    for schedule in ("1f1b", "zb-h1", "zb-h2", "compact-zb"):
        assert measured(schedule, workers, microbatches, times_s).bubble_ratio <= most + EXACT
