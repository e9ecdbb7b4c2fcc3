from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.check import check_plan
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.schedules import SCHEDULES
from tests.helpers.scenarios.builders import GIB, chain_plan, chain_scenario, layered_plan, mesh_scenario
from traces.common.errors import InputError

SCENARIO = chain_scenario([1.0, 1.0], [1.0, 1.0], parameter_bytes=GIB // 16, activation_bytes=GIB // 16)
PLAN = chain_plan(SCENARIO)


def with_stages(*stages: Stage, microbatches: tuple[int, ...] = (1,) * 8) -> Plan:
    return replace(PLAN, pipelines=(Pipeline(stages, microbatches),))


def stage(first: int, end: int, device: str, in_flight: int = 1, share: float = 1.0) -> Stage:
    return Stage(first, end, (Replica(device, share),), in_flight)


FIRST, SECOND = stage(0, 1, "device-0", 2), stage(1, 2, "device-1")

REFUSED: dict[str, tuple[Plan, str, str, str]] = {
    "another model": (
        replace(PLAN, model="gpt"),
        "model",
        "the plan is for model 'gpt'",
        "scenario 'chain' trains 'chain': make a plan with 'ropebridge plan'",
    ),
    "unknown schedule": (
        replace(PLAN, schedule="1f1v"),
        "schedule",
        "unknown schedule '1f1v'",
        f"did you mean '1f1b'? valid: {', '.join([*SCHEDULES, 'explicit'])}",
    ),
    "unknown order": (
        replace(PLAN, order="dynamc"),
        "order",
        "unknown order 'dynamc'",
        "did you mean 'dynamic'? valid: scheduled, dynamic",
    ),
    "no pipelines": (replace(PLAN, pipelines=()), "pipelines", "the plan has no pipelines", "give at least one"),
    "no stages": (with_stages(), "pipelines[0]", "the pipeline has no stages", "give at least one"),
    "no replicas": (
        with_stages(FIRST, replace(SECOND, replicas=())),
        "pipelines[0].stages[1]",
        "the stage has no replicas",
        "give at least one",
    ),
    "unknown device": (
        with_stages(FIRST, stage(1, 2, "device-l")),
        "pipelines[0].stages[1].replicas[0].device",
        "unknown device 'device-l'",
        "did you mean 'device-1'? valid: device-0, device-1",
    ),
    "device used twice": (
        with_stages(FIRST, replace(SECOND, replicas=(Replica("device-1"), Replica("device-0")))),
        "pipelines[0].stages[1].replicas[1].device",
        "device 'device-0' is used twice",
        "it already works in pipelines[0].stages[0].replicas[0]; stages of one pipeline share all of their devices, in "
        "the same order, or none",
    ),
    "device twice in a stage": (
        with_stages(FIRST, replace(SECOND, replicas=(Replica("device-1"), Replica("device-1")))),
        "pipelines[0].stages[1].replicas[1].device",
        "device 'device-1' is used twice",
        "it already works in pipelines[0].stages[1].replicas[0]; stages of one pipeline share all of their devices, in "
        "the same order, or none",
    ),
    "share of nothing": (
        with_stages(stage(0, 1, "device-0", 2, share=0.0), SECOND),
        "pipelines[0].stages[0].replicas[0].share",
        "share 0 is not allowed",
        "a share is a number above zero, 1e9 at most",
    ),
    "share that is no number": (
        with_stages(stage(0, 1, "device-0", 2, share=float("nan")), SECOND),
        "pipelines[0].stages[0].replicas[0].share",
        "share nan is not allowed",
        "a share is a number above zero, 1e9 at most",
    ),
    "first layers missing": (
        with_stages(stage(1, 2, "device-0")),
        "pipelines[0].stages[0]",
        "the stage holds layers 1 to 2 (exclusive)",
        "stages cover every layer once and in order: this one starts at layer 0",
    ),
    "layers twice": (
        with_stages(FIRST, stage(0, 2, "device-1")),
        "pipelines[0].stages[1]",
        "the stage holds layers 0 to 2 (exclusive)",
        "stages cover every layer once and in order: this one starts at layer 1",
    ),
    "stage without layers": (
        with_stages(stage(0, 0, "device-0"), stage(0, 2, "device-1")),
        "pipelines[0].stages[0]",
        "the stage holds layers 0 to 0 (exclusive)",
        "stages cover every layer once and in order: this one starts at layer 0",
    ),
    "last layers missing": (
        with_stages(FIRST),
        "pipelines[0].stages",
        "the stages end at layer 1",
        "model 'chain' has 2 layers: the last stage ends at 2",
    ),
    "layers that are not there": (
        with_stages(FIRST, stage(1, 3, "device-1")),
        "pipelines[0].stages",
        "the stages end at layer 3",
        "model 'chain' has 2 layers: the last stage ends at 2",
    ),
    "no microbatches": (
        with_stages(FIRST, SECOND, microbatches=()),
        "pipelines[0].microbatches",
        "microbatches [] are not allowed",
        "give at least one, each with at least one sample",
    ),
    "empty microbatch": (
        with_stages(FIRST, SECOND, microbatches=(8, 0)),
        "pipelines[0].microbatches",
        "microbatches [8, 0] are not allowed",
        "give at least one, each with at least one sample",
    ),
    "no depth": (
        with_stages(FIRST, stage(1, 2, "device-1", 0)),
        "pipelines[0].stages",
        "in-flight depths [2, 0] are not allowed",
        "every depth is at least 1, and at most 2**53",
    ),
    "more depth than an integer of the machine": (
        with_stages(FIRST, stage(1, 2, "device-1", 2**64)),
        "pipelines[0].stages",
        f"in-flight depths [2, {2**64}] are not allowed",
        "every depth is at least 1, and at most 2**53",
    ),
    "growing depths": (
        with_stages(FIRST, stage(1, 2, "device-1", 3)),
        "pipelines[0].stages",
        "in-flight depths [2, 3] would deadlock",
        "a stage waits for as many forwards as its depth before its first backward, so depths may not "
        "grow from stage to stage",
    ),
    "too little memory": (
        # 1/8 GiB of parameters and gradients, and two microbatches of eight times 1/16 GiB.
        with_stages(FIRST, SECOND, microbatches=(8, 8)),
        "pipelines[0].stages[0]",
        "layers 0 to 0 need 1.12 GiB on device 'device-0' (128.00 MiB of states, 1.00 GiB of activations of 2 "
        "microbatches in flight), which has 1.00 GiB",
        f"free {GIB // 8} bytes: fewer layers, smaller microbatches or less depth",
    ),
    "another global batch": (
        with_stages(FIRST, SECOND, microbatches=(1,) * 7),
        "pipelines",
        "the microbatches add up to 7 samples",
        "scenario 'chain' trains with a global batch of 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_is_refused_with_where_what_and_what_would_be_valid(case: str) -> None:
    plan, where, problem, valid = REFUSED[case]
    with pytest.raises(InputError) as caught:
        check_plan(plan, SCENARIO)
    assert (caught.value.where, caught.value.problem, caught.value.valid) == (where, problem, valid)


def test_a_good_plan_passes() -> None:
    check_plan(PLAN, SCENARIO)


def test_gpipe_needs_no_falling_depths_but_memory_for_all_microbatches() -> None:
    growing = replace(with_stages(stage(0, 1, "device-0"), stage(1, 2, "device-1", 3)), schedule="gpipe")
    check_plan(growing, SCENARIO)
    small = replace(SCENARIO, cluster=chain_scenario([1.0] * 2, [1.0] * 2, memory_bytes=GIB // 2).cluster)
    check_plan(replace(growing, schedule="1f1b", pipelines=PLAN.pipelines), small)
    with pytest.raises(InputError, match="8 microbatches in flight"):
        check_plan(growing, small)


def test_an_output_that_no_memory_holds_is_refused() -> None:
    huge = [replace(layer, output_bytes=GIB) for layer in SCENARIO.model.layers]
    scenario = replace(SCENARIO, model=replace(SCENARIO.model, layers=tuple(huge)))
    with pytest.raises(
        InputError, match=r"an output of layers 0 to 0 needs 2\.00 GiB on device 'device-0', which has 1\.00 GiB"
    ):
        check_plan(chain_plan(scenario, microbatches=(2, 2, 2, 2)), scenario)


def test_depths_beyond_the_number_of_microbatches_need_no_memory() -> None:
    check_plan(with_stages(stage(0, 1, "device-0", 99), SECOND), SCENARIO)


def without_links(scenario: Scenario, keep: Callable[[Link], bool] = lambda link: False) -> Scenario:
    cluster = Cluster(scenario.cluster.devices, tuple(link for link in scenario.cluster.links if keep(link)))
    return replace(scenario, cluster=cluster)


def test_a_path_is_needed_between_stages() -> None:
    with pytest.raises(InputError) as caught:
        check_plan(PLAN, without_links(SCENARIO))
    assert str(caught.value) == (
        "cluster.links: no link leads from region 'region-0' (device 'device-0') to 'region-1' (device 'device-1'); "
        "add one with 'between: [region-0, region-1]'"
    )


def test_a_path_back_is_needed_too() -> None:
    with pytest.raises(InputError, match=r"from region 'region-1' .* to 'region-0'"):
        check_plan(PLAN, without_links(SCENARIO, lambda link: link.source == "region-0"))


def test_a_path_is_needed_between_replicas_which_sum_gradients() -> None:
    scenario = without_links(mesh_scenario(2, [1.0], [1.0]))
    with pytest.raises(InputError, match=r"no link leads from device 'device-[01]' to 'device-[01]'"):
        check_plan(layered_plan(scenario, [([(1, 2, 1)], [8])]), scenario)


def test_a_path_is_needed_between_pipelines_which_sum_gradients() -> None:
    scenario = without_links(mesh_scenario(2, [1.0], [1.0]))
    with pytest.raises(InputError, match=r"no link leads from device 'device-[01]' to 'device-[01]'"):
        check_plan(layered_plan(scenario, [([(1, 1, 1)], [4]), ([(1, 1, 1)], [4])]), scenario)


def test_a_device_kind_without_times_is_named_with_those_that_have_some() -> None:
    cluster = Cluster((Device("device-0", "t4", "region-0", GIB), SCENARIO.cluster.devices[1]), SCENARIO.cluster.links)
    with pytest.raises(InputError) as caught:
        check_plan(PLAN, replace(SCENARIO, cluster=cluster))
    assert caught.value.problem == "model 'chain' has no times for layer 'layer-0' on device kind 't4'"
    assert caught.value.valid.startswith("profiled kinds: kind-0, kind-1; ")


def test_memory_counts_the_microbatch_that_gives_a_replica_the_most_samples() -> None:
    # Of 8 samples the second of three replicas takes 3 to 5, two; of 7 it takes 2 to 5, three.
    scenario = mesh_scenario(3, [1.0], [1.0], global_batch=15, activation_bytes=1000, parameter_bytes=[0])
    plan = layered_plan(scenario, [([(1, 3, 1)], [8, 7])])
    widest = [max(end - first for first, end in plan.pipelines[0].stages[0].intervals(size)) for size in (8, 7)]
    assert widest == [3, 3]
    assert [plan.pipelines[0].stages[0].intervals(size)[1] for size in (8, 7)] == [(3, 5), (2, 5)]
    tight = replace(scenario.cluster.devices[1], memory_bytes=2500)
    devices = (scenario.cluster.devices[0], tight, scenario.cluster.devices[2])
    with pytest.raises(InputError, match="on device 'device-1'"):
        check_plan(plan, replace(scenario, cluster=Cluster(devices, scenario.cluster.links)))


def test_a_model_of_the_same_name_with_other_layers_is_refused() -> None:
    shorter = replace(SCENARIO, model=ModelProfile("chain", SCENARIO.model.layers[:1]))
    with pytest.raises(InputError, match="model 'chain' has 1 layers"):
        check_plan(PLAN, shorter)
