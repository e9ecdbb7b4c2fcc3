"""What a plan can say beside stages and microbatches is refused where it cannot be, and accepted where it can."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.check import check_plan
from planner.check.memory import microbatches_held
from planner.check.stages import check_placement
from planner.plan.actions import parse_action
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.cluster import Cluster
from planner.scenario.effects import ComputeEffects, Effects, MemoryEffects, Slowdown, Straggler
from planner.scenario.faults import Absence, Fault, Hang, LinkOutage
from planner.scenario.scenario import Scenario
from planner.scenario.training import COMPRESSIONS
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError

CHAIN = chain_scenario([1.0, 1.0], [1.0, 1.0], global_batch=2)
PLAN = chain_plan(CHAIN)


def refusal(plan: Plan, scenario: Scenario = CHAIN) -> tuple[str, str, str]:
    with pytest.raises(InputError) as caught:
        check_plan(plan, scenario)
    return caught.value.where, caught.value.problem, caught.value.valid


def on_one_host(
    *, devices: int = 4, kinds: Sequence[str] = ("kind-0",) * 4, hosts: Sequence[str] = ("h",) * 4
) -> Scenario:
    """A chain of four layers whose devices stand in one region, on hosts of their own choice."""
    scenario = chain_scenario([1.0] * devices, [1.0] * devices, global_batch=2)
    placed = tuple(
        replace(device, region="region-0", kind=kind, host=host)
        for device, kind, host in zip(scenario.cluster.devices, kinds, hosts, strict=False)
    )
    link = replace(scenario.cluster.links[0], source="region-0", target="region-0")
    model = replace(scenario.model, sharded={2: scenario.model})
    return replace(scenario, cluster=Cluster(placed, (link,)), model=model)


def explicit(*orders: str, microbatches: tuple[int, ...] = (1, 1), stages: tuple[Stage, ...] = ()) -> Plan:
    rows = tuple(tuple(parse_action(text) for text in order.split()) for order in orders)
    pipeline = Pipeline(stages or PLAN.pipelines[0].stages, microbatches, rows)
    return replace(PLAN, schedule="explicit", pipelines=(pipeline,))


def two_pipelines() -> tuple[Plan, Scenario]:
    scenario = replace(CHAIN, training=replace(CHAIN.training, global_batch=2))
    pipelines = tuple(Pipeline((Stage(0, 2, (Replica(f"device-{n}"),), 1),), (1,)) for n in range(2))
    kinds = {f"kind-{n}" for n in range(2)}
    assert all(set(layer.times) == kinds for layer in scenario.model.layers)
    return replace(PLAN, pipelines=pipelines), scenario


# Compression.


def test_an_unknown_compression_is_refused_with_the_nearest() -> None:
    expected = ("compression", "unknown compression 'bf61'", "did you mean 'bf16'? valid: none, bf16, int8")
    assert refusal(replace(PLAN, compression="bf61")) == expected
    for known in COMPRESSIONS:
        check_plan(replace(PLAN, compression=known), CHAIN)


# Stages that share devices.


def test_stages_on_the_same_devices_are_one_worker() -> None:
    scenario = on_one_host()
    stages = [Stage(n, n + 1, (Replica(f"device-{worker}"),), 1) for n, worker in enumerate((0, 1, 1, 0))]
    orders = "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"
    plan = replace(explicit(*orders, stages=tuple(stages)), scenario=scenario.name, model=scenario.model.name)
    check_plan(plan, scenario)
    other = replace(stages[3], replicas=(Replica("device-0"), Replica("device-2")))
    assert refusal(explicit(*orders, stages=(*stages[:3], other)), scenario)[:2] == (
        "pipelines[0].stages[3].replicas[0].device",
        "device 'device-0' is used twice",
    )


def test_stages_on_the_same_devices_share_alike() -> None:
    scenario = on_one_host()
    both = (Replica("device-0", 1.0), Replica("device-1", 2.0))
    stages = (Stage(0, 2, both, 1), Stage(2, 4, (replace(both[0], share=2.0), both[1]), 1))
    assert refusal(explicit("0F0 1F0 1B0 0B0", microbatches=(2,), stages=stages), scenario) == (
        "pipelines[0].stages[1].replicas",
        "the stage's shares are 2, 2",
        "it is on the same devices as pipelines[0].stages[0], so it takes the same samples: 1, 2",
    )


def test_two_pipelines_share_no_device() -> None:
    plan, scenario = two_pipelines()
    pipelines = (plan.pipelines[0], plan.pipelines[0])
    assert refusal(replace(plan, pipelines=pipelines), scenario)[1] == "device 'device-0' is used twice"


@pytest.mark.parametrize(
    ("schedule", "workers", "valid"),
    [
        ("1f1b", (0, 1, 0, 1), "every stage is on devices of its own: 0, 1, 2, 3"),
        ("zb-v", (0, 1, 0, 1), "stages go down the workers and back up, two on each: 0, 1, 1, 0"),
        ("zb-v", (0, 1), "stages go down the workers and back up, two on each: 0, 1, 1, 0"),
        ("interleaved-1f1b", (0, 1, 1, 0), "stages go round the workers, all of them equally often: 0, 1, 0, 1"),
        ("interleaved-1f1b", (0, 1, 0), "stages go round the workers, all of them equally often: 0, 1, 0, 1"),
    ],
)
def test_a_schedule_needs_its_placement(schedule: str, workers: tuple[int, ...], valid: str) -> None:
    stages = tuple(Stage(n, n + 1, (Replica(f"device-{worker}"),), 1) for n, worker in enumerate(workers))
    plan = replace(PLAN, schedule=schedule)
    with pytest.raises(InputError) as caught:
        check_placement(Pipeline(stages, (1,)), plan, "pipelines[0]")
    assert caught.value.where == "pipelines[0].stages"
    assert caught.value.problem == (
        f"schedule '{schedule}' cannot have its stages on workers {', '.join(map(str, workers))} "
        f"(devices {', '.join(f'device-{worker}' for worker in workers)})"
    )
    assert caught.value.valid == f"{valid}; stages with the same devices are on one worker"
    check_placement(Pipeline(stages, (1,)), replace(plan, order="dynamic"), "pipelines[0]")


@pytest.mark.parametrize(
    ("schedule", "workers"),
    [
        ("zb-v", (0, 1, 1, 0)),
        ("zb-v", (0, 0)),
        ("interleaved-1f1b", (0, 1, 0, 1)),
        ("zb-h1", (0, 1, 2)),
        ("compact-zb", (0, 1, 1, 2)),
    ],
)
def test_a_placement_that_fits(schedule: str, workers: tuple[int, ...]) -> None:
    stages = tuple(Stage(n, n + 1, (Replica(f"device-{worker}"),), 1) for n, worker in enumerate(workers))
    check_placement(Pipeline(stages, (1,)), replace(PLAN, schedule=schedule), "")


# Tensor parallelism.


def tensor_parallel(*partners: str) -> Plan:
    stages = (Stage(0, 4, (Replica("device-0", 1.0, partners),), 1),)
    return replace(PLAN, pipelines=(Pipeline(stages, (1, 1)),))


def test_a_tensor_parallel_group_in_one_host() -> None:
    check_plan(tensor_parallel("device-1"), on_one_host())


@pytest.mark.parametrize(
    ("partners", "scenario", "expected"),
    [
        (
            ("device-9",),
            on_one_host(),
            ("unknown device 'device-9'", "did you mean"),
        ),
        (("device-0",), on_one_host(), ("device 'device-0' is used twice", "it already works in pipelines[0]")),
        (
            ("device-1",),
            on_one_host(hosts=("h", "g", "h", "h")),
            ("device 'device-1' is in host 'g', device 'device-0' in 'h'", "in one host"),
        ),
        (
            ("device-1",),
            on_one_host(kinds=("kind-0", "kind-1", "kind-0", "kind-0")),
            ("device 'device-1' is a kind-1, device 'device-0' a kind-0", "of one kind"),
        ),
    ],
)
def test_a_group_that_cannot_be(partners: tuple[str, ...], scenario: Scenario, expected: tuple[str, str]) -> None:
    where, problem, valid = refusal(tensor_parallel(*partners), scenario)
    assert (where, problem) == ("pipelines[0].stages[0].replicas[0].partners[0]", expected[0])
    assert expected[1] in valid


def test_a_group_is_as_large_as_its_smallest_device() -> None:
    scenario = on_one_host()
    small = replace(scenario.cluster.devices[1], memory_bytes=5000)
    devices = (scenario.cluster.devices[0], small, *scenario.cluster.devices[2:])
    scenario = replace(scenario, cluster=Cluster(devices, scenario.cluster.links))
    where, problem, _ = refusal(tensor_parallel("device-1"), scenario)
    assert (where, "on device 'device-1'" in problem) == ("pipelines[0].stages[0]", True)


# Synchronisation.


@pytest.mark.parametrize(
    ("how", "where", "problem"),
    [
        (Synchronisation("allreduc"), "method", "unknown method 'allreduc'"),
        (Synchronisation(algorithm="rin"), "algorithm", "unknown algorithm 'rin'"),
        (
            Synchronisation("ma", interval_steps=0),
            "interval_steps",
            "0 steps between exchanges are not allowed with method 'ma'",
        ),
        (
            Synchronisation("asgd", interval_steps=2),
            "interval_steps",
            "2 steps between exchanges are not allowed with method 'asgd'",
        ),
        (
            Synchronisation(interval_steps=2),
            "interval_steps",
            "2 steps between exchanges are not allowed with method 'allreduce'",
        ),
        (Synchronisation("asgd", staleness_bound=-1), "staleness_bound", "a staleness bound of -1 is not allowed"),
        (
            Synchronisation(staleness_bound=1),
            "staleness_bound",
            "a staleness bound of 1 does not fit method 'allreduce': all pipelines wait",
        ),
        (
            Synchronisation("diloco", interval_steps=0),
            "interval_steps",
            "0 steps between exchanges are not allowed with method 'diloco'",
        ),
        (
            Synchronisation("diloco", staleness_bound=1),
            "staleness_bound",
            "a staleness bound of 1 does not fit method 'diloco', whose outer steps have a fixed place",
        ),
        (
            Synchronisation("ma", outer=OuterStep(momentum=0.0)),
            "outer",
            "an outer step does not fit method 'ma'",
        ),
        (
            Synchronisation("diloco", outer=OuterStep(learning_rate=0.0)),
            "outer.learning_rate",
            "a learning rate of 0 is not allowed",
        ),
        (
            Synchronisation("diloco", outer=OuterStep(momentum=1.0)),
            "outer.momentum",
            "a momentum of 1 is not allowed",
        ),
        (
            Synchronisation("diloco", outer=OuterStep(compression="int5")),
            "outer.compression",
            "unknown compression 'int5'",
        ),
        (Synchronisation("diloco", outer=OuterStep(density=0.0)), "outer.density", "a density of 0 is not allowed"),
        (
            Synchronisation("diloco", outer=OuterStep(feedback=1.5)),
            "outer.feedback",
            "an error feedback of 1.5 is not allowed",
        ),
        (
            Synchronisation("diloco", interval_steps=8, outer=OuterStep(overlap_steps=2)),
            "outer.overlap_steps",
            "'overlap_steps' does not fit method 'diloco', which exchanges the whole model at once",
        ),
        (
            Synchronisation("diloco-streaming", outer=OuterStep(quorum=1)),
            "outer.quorum",
            "'quorum' does not fit method 'diloco-streaming', which waits for all pipelines",
        ),
        (
            Synchronisation("diloco-decoupled", outer=OuterStep(quorum=9, syncers=("hub",))),
            "outer.quorum",
            "a quorum of 9 is not allowed",
        ),
        (
            Synchronisation("diloco-decoupled", outer=OuterStep(grace_s=-1.0, syncers=("hub",))),
            "outer.grace_s",
            "a grace of -1 is not allowed",
        ),
        (
            Synchronisation("diloco-decoupled", outer=OuterStep(exchange="reduce-scatter", syncers=("hub",))),
            "outer.exchange",
            "'exchange' does not fit method 'diloco-decoupled', which has syncers",
        ),
        (
            Synchronisation("diloco-decoupled", outer=OuterStep(syncers=("hub",))),
            "outer.syncers[0]",
            "unknown device 'hub'",
        ),
        (
            Synchronisation("diloco-decoupled", staleness_bound=1, outer=OuterStep(syncers=("hub",))),
            "staleness_bound",
            "a staleness bound of 1 does not fit method 'diloco-decoupled', with which no pipeline waits",
        ),
        (
            Synchronisation("diloco-streaming", interval_steps=8, outer=OuterStep(fragments=99)),
            "outer.fragments",
            "99 fragments of 2 layers in 8 steps are not allowed",
        ),
        (
            Synchronisation("diloco-streaming", outer=OuterStep(fragments=2)),
            "outer.fragments",
            "2 fragments of 2 layers in 1 steps are not allowed",
        ),
        (
            Synchronisation("diloco-streaming", interval_steps=8, outer=OuterStep(overlap_steps=8)),
            "outer.overlap_steps",
            "an overlap of 8 steps is not allowed with 8 steps between exchanges",
        ),
        (
            Synchronisation("diloco-streaming", interval_steps=8, outer=OuterStep(mixing=1.0)),
            "outer.mixing",
            "a mixing of 1 is not allowed",
        ),
        (
            Synchronisation("diloco-streaming", interval_steps=8, outer=OuterStep(pattern="stride")),
            "outer.pattern",
            "unknown pattern 'stride'",
        ),
    ],
)
def test_a_synchronisation_that_cannot_be(how: Synchronisation, where: str, problem: str) -> None:
    plan, scenario = two_pipelines()
    assert refusal(replace(plan, synchronisation=how), scenario)[:2] == (f"synchronisation.{where}", problem)


@pytest.mark.parametrize(
    "how",
    [
        Synchronisation("asgd"),
        Synchronisation("asgd-ga", interval_steps=4, staleness_bound=0),
        Synchronisation("ma", interval_steps=8),
    ],
)
def test_a_synchronisation_of_several_pipelines(how: Synchronisation) -> None:
    plan, scenario = two_pipelines()
    check_plan(replace(plan, synchronisation=how), scenario)
    where, problem, _ = refusal(replace(PLAN, synchronisation=how))
    assert (where, problem) == (
        "synchronisation.method",
        f"method '{how.method}' needs several pipelines: a single pipeline has no other to exchange with",
    )


@pytest.mark.parametrize(
    "how",
    [
        Synchronisation("diloco", interval_steps=500),
        Synchronisation("diloco-streaming", interval_steps=8, outer=OuterStep(fragments=2, overlap_steps=7)),
    ],
)
def test_outer_steps_of_several_pipelines_or_of_one(how: Synchronisation) -> None:
    plan, scenario = two_pipelines()
    check_plan(replace(plan, synchronisation=how), scenario)
    check_plan(replace(PLAN, synchronisation=how), CHAIN)


def test_pipelines_that_exchange_need_a_path() -> None:
    plan, scenario = two_pipelines()
    cut = replace(scenario, cluster=Cluster(scenario.cluster.devices, scenario.cluster.links[:1]))
    for method in ("allreduce", "asgd"):
        with pytest.raises(InputError, match="no link leads from region"):
            check_plan(replace(plan, synchronisation=Synchronisation(method)), cut)


def test_connections_are_one_or_more() -> None:
    assert refusal(replace(PLAN, connections=0)) == ("connections", "0 connections are not allowed", "give 1 or more")


# Orders.

GOOD = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1"


def test_orders_that_can_be_carried_out() -> None:
    check_plan(explicit(*GOOD), CHAIN)


@pytest.mark.parametrize(
    ("orders", "where", "problem", "valid"),
    [
        ((), "", "the schedule is 'explicit', with orders for 0 workers", "one list of actions for each of the 2"),
        (GOOD[:1], "", "the schedule is 'explicit', with orders for 1 workers", "one list"),
        (
            (GOOD[0], "1F0 1B0 2F1 1B1"),
            "[1][2]",
            "action 2F1 is of a stage or microbatch that does not exist",
            "stages 0 to 1, microbatches 0 to 1",
        ),
        (
            ("0F0 0F1 1B0 0B1", GOOD[1]),
            "[0][2]",
            "action 1B0 is in the order of worker 0",
            "worker 1 holds stage 1: move it to orders[1]",
        ),
        (
            (GOOD[0], "1F0 1B0 1F1 1I1"),
            "[1]",
            "microbatch 1 passes stage 1 with 1F1, 1I1",
            "give 1F1 and 1B1, or 1F1, 1I1 and 1W1, each once",
        ),
        ((GOOD[0] + " 0F0", GOOD[1]), "[0]", "microbatch 0 passes stage 0 with 0F0, 0F0, 0B0", "each once"),
        ((GOOD[0], "1F0 1B0"), "[1]", "microbatch 1 passes stage 1 with no action", "each once"),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "",
            "devices wait for each other in a cycle: device 'device-0' has 0B0 next, which needs 1B0 of device "
            "'device-1'; device 'device-1' has 1F1 next, which needs 0F1 of device 'device-0'",
            "let one of these actions come later in its order",
        ),
    ],
)
def test_orders_that_cannot_be(orders: tuple[str, ...], where: str, problem: str, valid: str) -> None:
    found = refusal(explicit(*orders))
    assert found[:2] == (f"pipelines[0].orders{where}", problem)
    assert valid in found[2]


def test_orders_and_the_schedule_fit_each_other() -> None:
    assert refusal(replace(explicit(*GOOD), schedule="1f1b"))[:2] == (
        "pipelines[0].orders",
        "the plan has orders but its schedule is '1f1b'",
    )
    assert refusal(replace(explicit(*GOOD), order="dynamic"))[:2] == (
        "order",
        "the plan has explicit orders, but its order is 'dynamic'",
    )


def test_a_dynamic_order_does_not_wait_for_its_depth() -> None:
    growing = tuple(replace(stage, in_flight=n + 1) for n, stage in enumerate(PLAN.pipelines[0].stages))
    plan = replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=growing),))
    assert "would deadlock" in refusal(plan)[1]
    check_plan(replace(plan, order="dynamic"), CHAIN)


def test_memory_is_that_of_the_orders_and_of_all_stages_of_a_worker() -> None:
    pipeline = explicit(*GOOD).pipelines[0]
    assert [microbatches_held(pipeline, explicit(*GOOD), stage) for stage in (0, 1)] == [2, 1]
    scenario = on_one_host()
    stages = tuple(Stage(n, n + 1, (Replica(f"device-{worker}"),), 1) for n, worker in enumerate((0, 1, 1, 0)))
    plan = explicit("0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1", stages=stages)
    small = tuple(replace(device, memory_bytes=18_000) for device in scenario.cluster.devices)
    where, problem, valid = refusal(plan, replace(scenario, cluster=Cluster(small, scenario.cluster.links)))
    # Parameters and gradients of two layers, 2 * 2 * 4000 bytes, and activations of 2 + 1 microbatches of one sample.
    assert where == "pipelines[0].stages[0]"
    assert problem == (
        "layers 0 to 0 and 3 to 3 need 19000 B on device 'device-0' (16000 B of states, 3000 B of activations of "
        "2 and 1 microbatches in flight), which has 18000 B"
    )
    assert valid.startswith("free 1000 bytes: ")


def test_memory_is_also_what_the_framework_takes() -> None:
    # 8000 bytes of parameters and gradients, 2 microbatches of 1000 bytes, 5000 of framework, half a layer at work.
    effects = Effects(memory=MemoryEffects(5000, 0.5))
    small = tuple(replace(device, memory_bytes=15_000) for device in CHAIN.cluster.devices)
    scenario = replace(CHAIN, effects=effects, cluster=Cluster(small, CHAIN.cluster.links))
    assert refusal(PLAN, scenario)[1:] == (
        "layers 0 to 0 need 15500 B on device 'device-0' (8000 B of states, 2000 B of activations of 2 microbatches in "
        "flight, 5500 B of framework and workspace), which has 15000 B",
        "free 500 bytes: fewer layers, smaller microbatches or less depth",
    )


# What the scenario foresees.


@pytest.mark.parametrize(
    ("faults", "where", "problem"),
    [
        ((Absence("device-9", 1.0),), "faults[0].device", "unknown device 'device-9'"),
        ((Hang("device-0", 1.0), Absence("device-9", 1.0)), "faults[1].device", "unknown device 'device-9'"),
        ((LinkOutage("a->b", 1.0, 2.0),), "faults[0].link", "unknown link 'a->b'"),
        (
            (Hang("device-0", 1.0, 3.0), Absence("device-1", 0.0), Absence("device-0", 2.0)),
            "faults[2]",
            "device 'device-0' has two faults at the same time",
        ),
    ],
)
def test_faults_of_what_is_not_there(faults: tuple[Fault, ...], where: str, problem: str) -> None:
    assert refusal(PLAN, replace(CHAIN, faults=faults))[:2] == (where, problem)


@pytest.mark.parametrize(
    ("compute", "where"),
    [
        (ComputeEffects(stragglers=(Straggler("device-9", 2.0),)), "stragglers[0]"),
        (ComputeEffects(slowdowns=(Slowdown("device-9", (0.0,), (0.5,)),)), "slowdowns[0]"),
    ],
)
def test_effects_of_what_is_not_there(compute: ComputeEffects, where: str) -> None:
    scenario = replace(CHAIN, effects=Effects(compute=compute))
    assert refusal(PLAN, scenario)[:2] == (f"effects.compute.{where}.device", "unknown device 'device-9'")
