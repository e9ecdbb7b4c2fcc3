"""What every backend does: one suite, held against the simulator and against real processes."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from statistics import median

import numpy as np
import pytest

from executor.backend import TorchBackend
from executor.core.step_program import compile_plan
from planner.adapt.adaptation import Adaptation
from planner.adapt.observation import Observation, is_exchange, seen_with_steps
from planner.adapt.policy import DECISION_LAG_STEPS, Policy
from planner.cost.synchronisation import syncer_pairs
from planner.events.event import OUTER_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.record import Backend, RunRecord
from planner.scenario.scenario import Scenario
from planner.scenario.training import BatchLimits
from planner.systems.deepcee.policy import DeepceePolicy, DepthPolicy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted as ScriptedPlans
from tests.helpers.strategies.timeless_rows import rows
from tests.sim.test_outer_steps import regions
from traces.trace import LinkTrace

BACKENDS: dict[str, Callable[[], Backend]] = {
    "simulated": Simulator,
    "paced": lambda: TorchBackend("paced", emulator="shaper"),
}
STEPS = 6


class Scripted:
    """Changes the plan after step 1, whatever it sees."""

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        return plan.with_microbatches(0, (2,) * 8, (3, 1, 1)) if observation.step == 1 else None


def hybrid() -> tuple[Scenario, Plan]:
    """Three stages; the middle one has two devices with unequal shares, so that gradients are summed over a link."""
    scenario = chain_scenario(
        [0.002, 0.004, 0.003, 0.002],
        [0.004, 0.008, 0.006, 0.004],
        output_bytes=[20000, 20000, 20000, 20000],
        bandwidth_bps=200e6,
        latency_s=0.004,
        global_batch=16,
        parameter_bytes=40000,
    )
    names = [device.name for device in scenario.cluster.devices]
    stages = (
        Stage(0, 1, (Replica(names[0]),), 3),
        Stage(1, 2, (Replica(names[1], 3.0), Replica(names[2], 1.0)), 2),
        Stage(2, 4, (Replica(names[3]),), 1),
    )
    pipeline = Pipeline(stages, (4, 4, 4, 4))
    return scenario, Plan(scenario.name, scenario.model.name, "hand", "1f1b", (pipeline,))


@cache
def recorded(backend: str) -> RunRecord:
    scenario, plan = hybrid()
    return BACKENDS[backend]().run(scenario, plan, Scripted(), STEPS)


def plan_of(step: int) -> Plan:
    _, plan = hybrid()
    changed = plan.with_microbatches(0, (2,) * 8, (3, 1, 1))
    return changed if step >= 1 + DECISION_LAG_STEPS else plan


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_decision_takes_effect_after_the_lag(backend: str) -> None:
    (decision,) = recorded(backend).decisions
    assert (decision.observed_step, decision.first_step) == (1, 1 + DECISION_LAG_STEPS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_device_does_the_actions_of_its_program_in_order(backend: str) -> None:
    scenario, _ = hybrid()
    done: defaultdict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in recorded(backend).events:
        if event.kind is EventKind.COMPUTE:
            done[event.device, event.step].append(event)
    for step in range(STEPS):
        for device, program in compile_plan(plan_of(step), scenario).items():
            events = done[device, step]
            expected = [(str(work.action.kind), work.action.microbatch) for work in program.work]
            assert [(event.action, event.microbatch) for event in events] == expected
            assert all(before.end_s <= after.start_s for before, after in pairwise(events))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_starts_before_what_it_needs_has_been_sent(backend: str) -> None:
    events = recorded(backend).events
    scenario, _ = hybrid()
    sent = {(e.device, e.peer, e.action, e.step, e.microbatch): e for e in events if e.kind is EventKind.SEND}
    started = {(e.device, e.action, e.step, e.microbatch): e for e in events if e.kind is EventKind.COMPUTE}
    for step in range(STEPS):
        for device, program in compile_plan(plan_of(step), scenario).items():
            for work in program.work:
                key = (str(work.action.kind), step, work.action.microbatch)
                for transfer in work.receives:
                    send = sent[(transfer.source, device, *key)]
                    assert send.end_s <= started[(device, *key)].start_s


def test_both_write_the_same_rows() -> None:
    assert rows(recorded("simulated")) == rows(recorded("paced"))


def test_both_change_the_global_batch_and_tell_its_learning_rate_alike() -> None:
    """Stages with unequal replicas; the noise scale is assumed to rise, and a policy sees it at the step's samples."""
    plain, plan = hybrid()
    limits = BatchLimits(8, 32, "adascale", ((0, 10.0), (200, 210.0)))
    scenario = replace(plain, training=replace(plain.training, batch=limits))
    larger = replace(plan.with_microbatches(0, (6, 6, 6, 6, 5), (3, 2, 1)), noise_scale=20.0)
    smaller = replace(plan.with_microbatches(0, (4, 4), (2, 2, 1)), noise_scale=40.0)
    batches, policies = (16, 16, 29, 29, 8, 8, 8), [ScriptedPlans({0: larger, 2: smaller}) for _ in BACKENDS]
    records = [
        backend().run(scenario, plan, policy, len(batches))
        for backend, policy in zip(BACKENDS.values(), policies, strict=True)
    ]
    assert rows(records[0]) == rows(records[1])
    for record, policy in zip(records, policies, strict=True):
        assert tuple(record.metrics["samples"]) == batches
        before = [sum(batches[:step]) for step in range(len(batches))]
        assert [seen.samples_before for seen in policy.seen] == before
        mean_s = [seen.end_s / (seen.step + 1) for seen in policy.seen]
        left_s = [each_s * (len(batches) - step - 1) for step, each_s in enumerate(mean_s)]
        assert [seen.left_s for seen in policy.seen] == pytest.approx(left_s)
        assert [seen.noise.noise_scale for seen in policy.seen if seen.noise] == [10.0 + each for each in before]
    rates = [list(record.metrics["learning_rate"]) for record in records]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 3


@pytest.mark.parametrize(
    "how",
    [Synchronisation(algorithm="tree"), Synchronisation(algorithm="hierarchical"), Synchronisation(bucket_bytes=1)],
)
def test_both_sum_gradients_in_the_same_messages(how: Synchronisation) -> None:
    scenario = mesh_scenario(
        3,
        [0.002] * 2,
        [0.004] * 2,
        link=lambda a, b: (200e6, 0.004),
        parameter_bytes=[40000, 20000],
        regions=["a", "a", "b"],
    )
    plan = replace(layered_plan(scenario, [([(2, 3, 1)], [6, 2])]), synchronisation=how)
    simulated, paced = (backend().run(scenario, plan, None, 2) for backend in BACKENDS.values())
    assert rows(simulated) == rows(paced)


@pytest.mark.parametrize(
    "outer",
    [
        OuterStep(),
        OuterStep(fragments=3, pattern="strided", overlap_steps=2, mixing=0.5, exchange="allgather"),
        OuterStep(fragments=2, overlap_steps=1, compression="int4", density=0.1),
        # Without overlap, means and the pseudo-gradients of the next fragment have one order only.
        OuterStep(fragments=3, pattern="strided", compression="int8", exchange="reduce-scatter"),
    ],
    ids=["at-once", "streaming", "compressed", "reduce-scatter"],
)
def test_both_exchange_the_same_pseudo_gradients_in_the_same_order(outer: OuterStep) -> None:
    """Three pipelines that cut the layers at other places; one has a stage of two replicas."""
    scenario = mesh_scenario(
        5,
        [0.002] * 4,
        [0.004] * 4,
        link=lambda a, b: (200e6, 0.004),
        parameter_bytes=[40000, 20000, 0, 30000],
        regions=["a", "a", "a", "b", "c"],
    )
    plan = layered_plan(scenario, [([(1, 2, 2), (4, 1, 1)], [2, 2]), ([(4, 1, 1)], [2]), ([(4, 1, 1)], [1, 1])])
    how = Synchronisation("diloco-streaming", interval_steps=4, outer=outer)
    scenario = replace(scenario, training=replace(scenario.training, global_batch=plan.global_batch))
    simulated, paced = (
        backend().run(scenario, replace(plan, synchronisation=how), None, 9) for backend in BACKENDS.values()
    )
    assert rows(simulated) == rows(paced)
    sent = [
        {
            device: [
                (e.peer, e.step, e.size_bytes)
                for e in record.events
                if e.action == UPDATE_ACTION and e.device == device
            ]
            for device in plan.devices
        }
        for record in (simulated, paced)
    ]
    assert sent[0] == sent[1]
    assert any(sent[0].values())


@pytest.mark.timed
def test_both_let_unequal_workers_exchange_the_same_with_a_syncer() -> None:
    """A worker of one device, a slower one of two stages; where the order of events matters, 48 ms are between them."""
    scenario = mesh_scenario(
        4,
        [0.02] * 2,
        [0.04] * 2,
        link=lambda a, b: (40e6, 0.03),
        parameter_bytes=[40000, 20000],
        regions=["a", "b", "b", "c"],
    )
    plan = layered_plan(scenario, [([(2, 1, 1)], [2]), ([(1, 1, 2), (2, 1, 1)], [1] * 5)])
    outer = OuterStep(fragments=2, overlap_steps=1, mixing=0.5, quorum=1, compression="int8", syncers=("device-3",))
    how = Synchronisation("diloco-decoupled", interval_steps=3, outer=outer)
    scenario = replace(scenario, training=replace(scenario.training, global_batch=plan.global_batch))
    simulated, paced = (
        backend().run(scenario, replace(plan, synchronisation=how), None, 5) for backend in BACKENDS.values()
    )
    # What each device sends each other one, and takes over or merges of it, in order.
    exchanged = [
        {
            (pair, kind): [
                (e.step, e.size_bytes)
                for e in record.events
                if e.kind is kind and e.action in (UPDATE_ACTION, OUTER_ACTION) and (e.device, e.peer) == pair
            ]
            for pair in syncer_pairs(replace(plan, synchronisation=how))
            for kind in (EventKind.SEND, EventKind.UPDATE)
        }
        for record in (simulated, paced)
    ]
    assert exchanged[0] == exchanged[1]
    assert rows(simulated) == rows(paced)


def fluctuating() -> tuple[Scenario, Plan]:
    trace = LinkTrace(np.array([0.0, 1.5, 4.0]), np.array([60e6, 12e6, 60e6]), 9.0)
    scenario = chain_scenario(
        [0.004, 0.003], [0.008, 0.006], output_bytes=[20000, 20000], latency_s=0.01, trace=trace, bandwidth_bps=40e6
    )
    return scenario, chain_plan(scenario, microbatches=[2, 2, 2, 2])


def detour() -> tuple[Scenario, Plan]:
    """Three regions in a row, of which the link between the first two drops for good."""
    trace = LinkTrace(np.array([0.0, 0.6]), np.array([100e6, 3e6]), 1e5)
    scenario = mesh_scenario(
        3,
        [0.004] * 6,
        [0.008] * 6,
        output_bytes=[40_000] * 6,
        parameter_bytes=[20_000] * 6,
        link=lambda a, b: (100e6, 0.005),
        regions=["a", "b", "c"],
    )
    names = {"device-0", "device-1"}
    links = (
        replace(link, trace=trace) if {link.source, link.target} == names else link for link in scenario.cluster.links
    )
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=tuple(links)))
    return scenario, layered_plan(scenario, [([(2, 1, 3), (4, 1, 2), (6, 1, 1)], [1] * 8)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "policy", "moves"),
    [(fluctuating, DepthPolicy, False), pytest.param(detour, DeepceePolicy, True, marks=pytest.mark.slow)],
)
def test_a_recorded_run_replayed_gives_the_same_decisions(
    backend: str, case: Callable[[], tuple[Scenario, Plan]], policy: Callable[[Scenario], Policy], moves: bool
) -> None:
    scenario, plan = case()
    record = BACKENDS[backend]().run(scenario, plan, policy(scenario), 25)
    assert record.decisions
    assert any(decision.migration.moves for decision in record.decisions) == moves
    replay = Adaptation(policy(scenario), plan, scenario)
    # A policy that is slow on a busy machine decides later.
    first_steps = {decision.observed_step: decision.first_step for decision in record.decisions}
    parts = seen_with_steps(record.events)
    for step in range(25):
        seen = replay.observe(step, parts[step])
        if (proposed := replay.propose(seen)) is not None:
            replay.install(seen, proposed, first_steps[step])
    assert tuple(replay.decisions) == record.decisions


@pytest.mark.parametrize("backup_every", [0, 5])
def test_policies_see_the_exchanges_of_outer_steps_alike(backup_every: int) -> None:
    """Exchanges arrive during later steps; those of the last worker take four times as long."""
    outer = OuterStep(fragments=2, pattern="strided", overlap_steps=1, mixing=0.5)
    scenario, plan = regions([0.1] * 3, [0.05, 0.05], 5, outer)
    slow = [
        replace(link, bandwidth_bps=link.bandwidth_bps / (4 if "device-2" in (link.source, link.target) else 1))
        for link in scenario.cluster.links
    ]
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=tuple(slow)))
    rates_bps = []
    for backend in (
        Simulator(backup_every=backup_every),
        TorchBackend("paced", emulator="shaper", backup_every=backup_every),
    ):
        policy = ScriptedPlans({})
        record = backend.run(scenario, plan, policy, 30)
        sent = [event for event in record.events if is_exchange(event)]
        assert len(sent) == 144
        assert all(event.arrived_s >= event.end_s for event in sent)
        paths = [path for each in policy.seen for path in each.paths if path.size_bytes > 100]
        rates_bps.append(
            {
                path: median(e.rate_bps for e in paths if (e.source, e.target) == path)
                for path in permutations(plan.devices, 2)
            }
        )
    simulated, real = rates_bps
    assert simulated["device-0", "device-1"] == pytest.approx(4 * simulated["device-0", "device-2"], rel=0.1)
    assert real == pytest.approx(simulated, rel=0.3)
