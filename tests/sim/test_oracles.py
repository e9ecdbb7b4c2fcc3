"""The simulator against exact answers: formulas, a published recursion, sums by hand, and the quick evaluator."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf

import numpy as np
import pytest
import simpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from executor.core.step_program import compile_plan
from planner.events.event import SYNC_ACTION, EventKind
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from sim.kernel.events import Flow, Timer
from sim.kernel.piecewise import RateTable, RateTables, join_tables, link_table
from sim.network.connection import SharedLink
from sim.network.shared_links import SharedLinks, first_come_rates, max_min_rates
from sim.network.single_link import FairLink, FifoLink
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, makespan_s
from tests.helpers.strategies.run_strategies import TIMES_S, chains, replicated, with_packets
from tests.helpers.strategies.trace_strategies import link_traces
from traces.trace import LinkTrace

EXACT = 1e-9


def simulated_s(scenario: Scenario, plan: Plan) -> float:
    return makespan_s(Simulator().run(scenario, plan, None, steps=1))


# --- closed forms ---------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    forward_s=TIMES_S,
    backward_s=st.floats(1e-3, 10.0),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_equal_stages_without_transfer_time_take_the_textbook_makespan(
    stages: int, microbatches: int, forward_s: float, backward_s: float, schedule: str
) -> None:
    scenario = chain_scenario(
        [forward_s] * stages, [backward_s] * stages, output_bytes=[0] * stages, global_batch=microbatches
    )
    plan = chain_plan(scenario, schedule=schedule)
    expected_s = (microbatches + stages - 1) * (forward_s + backward_s)
    assert simulated_s(scenario, plan) == pytest.approx(expected_s, rel=EXACT)


# --- DAPPLE ---------------------------------------------------------------------------------------------------


def dapple_s(forward_s: list[float], backward_s: list[float], microbatches: int, *, half_duplex_links: bool) -> float:
    """Makespan of the recursion of DAPPLE on steps 0..phi-1, the odd ones being communication.

    A forward i at step x starts after b(i - phi + x, x), f(i - 1, x) and f(i, x - 1); a backward after b(i, x + 1)
    and f(i + phi - x - 1, x), the last forward where there is no such one, and then b(i - 1, x). With
    ``half_duplex_links`` this holds for communication too, as published: one resource for both directions, with
    as many activations under way as the depth. Otherwise each direction waits for itself alone.
    """
    steps = len(forward_s)
    end: dict[tuple[str, int, int], float] = {}

    def done_s(kind: str, microbatch: int, step: int) -> float:
        if microbatch < 0 or not 0 <= step < steps:
            return 0.0
        return end[kind, microbatch, step]

    def waits_for(kind: str, i: int, x: int) -> list[tuple[str, int, int]]:
        joined = half_duplex_links or x % 2 == 0
        if kind == "f":
            return [("f", i - 1, x), ("f", i, x - 1), *([("b", i - steps + x, x)] if joined else [])]
        ordered = [("f", min(i + steps - x - 1, microbatches - 1), x)] if joined else []
        return [("b", i, x + 1), ("b", i - 1, x), *ordered]

    todo = {(kind, i, x) for kind in "fb" for i in range(microbatches) for x in range(steps)}
    while todo:
        for kind, i, x in sorted(todo):
            needs = [need for need in waits_for(kind, i, x) if need[1] >= 0 and 0 <= need[2] < steps]
            if kind == "b" and x == steps - 1:
                needs.append(("f", i, x))
            if all(need in end for need in needs):
                duration_s = (forward_s if kind == "f" else backward_s)[x]
                end[kind, i, x] = max([0.0, *(done_s(*need) for need in needs)]) + duration_s
                todo.remove((kind, i, x))
    return max(end.values())


@st.composite
def dapple_cases(draw: st.DrawFn) -> tuple[Scenario, Plan, list[float], list[float], int]:
    """Unequal stages whose depths are those of the expanded pipeline: phi - 2p = 2(P - p) - 1 for stage p."""
    stages = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 8))
    forward_s = draw(st.lists(TIMES_S, min_size=stages, max_size=stages))
    backward_s = draw(st.lists(st.floats(1e-3, 10.0), min_size=stages, max_size=stages))
    transfer_s = draw(st.lists(TIMES_S, min_size=stages, max_size=stages))
    scenario = chain_scenario(
        forward_s,
        backward_s,
        output_bytes=[round(seconds * 1e6) for seconds in transfer_s],
        bandwidth_bps=8e6,
        global_batch=microbatches,
    )
    plan = chain_plan(scenario, depths=[2 * (stages - stage) - 1 for stage in range(stages)])
    crossing_s = [layer.output_bytes / 1e6 for layer in scenario.model.layers]
    expanded = [0.0] * (2 * stages - 1)
    forwards_s, backwards_s = expanded.copy(), expanded.copy()
    forwards_s[::2], backwards_s[::2] = forward_s, backward_s
    forwards_s[1::2] = backwards_s[1::2] = crossing_s[:-1]
    return scenario, plan, forwards_s, backwards_s, microbatches


@settings(max_examples=150)
@given(dapple_cases())
def test_the_makespan_is_dapples_with_links_that_carry_both_ways_at_once(
    case: tuple[Scenario, Plan, list[float], list[float], int],
) -> None:
    scenario, plan, forward_s, backward_s, microbatches = case
    expected_s = dapple_s(forward_s, backward_s, microbatches, half_duplex_links=False)
    assert simulated_s(scenario, plan) == pytest.approx(expected_s, rel=EXACT)


@settings(max_examples=150)
@given(dapple_cases())
def test_dapples_published_recursion_is_never_quicker(
    case: tuple[Scenario, Plan, list[float], list[float], int],
) -> None:
    # It demands all that the simulator does, and besides that a link carries one direction at a time.
    scenario, plan, forward_s, backward_s, microbatches = case
    published_s = dapple_s(forward_s, backward_s, microbatches, half_duplex_links=True)
    assert simulated_s(scenario, plan) <= published_s * (1 + EXACT)


@settings(max_examples=150)
@given(dapple_cases())
def test_dapples_published_recursion_is_exact_where_transfers_take_no_time(
    case: tuple[Scenario, Plan, list[float], list[float], int],
) -> None:
    _, _, forward_s, backward_s, microbatches = case
    stages = len(forward_s[::2])
    scenario = chain_scenario(forward_s[::2], backward_s[::2], output_bytes=[0] * stages, global_batch=microbatches)
    plan = chain_plan(scenario, depths=[2 * (stages - stage) - 1 for stage in range(stages)])
    forward_s[1::2] = backward_s[1::2] = [0.0] * (stages - 1)
    expected_s = dapple_s(forward_s, backward_s, microbatches, half_duplex_links=True)
    assert simulated_s(scenario, plan) == pytest.approx(expected_s, rel=EXACT)


# --- links ----------------------------------------------------------------------------------------------------


def stepped(*, loops: bool) -> LinkTrace:
    """4 kbit/s for 2 s, an outage of 3 s, 2 kbit/s for 5 s."""
    return LinkTrace(np.array([0.0, 2.0, 5.0]), np.array([4000.0, 0.0, 2000.0]), 10.0, None, loops)


def test_a_transfer_over_an_outage_and_into_the_next_round_of_the_trace() -> None:
    scenario = chain_scenario(
        [1.0, 2.0], [1.0, 1.0], latency_s=0.5, trace=stepped(loops=True), bandwidth_bps=1800.0, global_batch=1
    )
    record = Simulator().run(scenario, chain_plan(scenario), None, steps=1)
    sends = [(e.start_s, e.end_s) for e in record.events if e.kind is EventKind.SEND]
    # 8,000 bits from 1 s: 4,000 until the outage, 4,000 from 5 s on. Back from 10.5 s: 6,000 until 12 s, then
    # 2,000 from 15 s on.
    assert sends == [(1.0, 7.0), (pytest.approx(10.5), pytest.approx(16.0))]
    receives = [e.end_s for e in record.events if e.kind is EventKind.RECEIVE]
    assert receives == pytest.approx([7.5, 16.5], rel=EXACT)
    assert makespan_s(record) == pytest.approx(17.5, rel=EXACT)


def test_a_transfer_that_starts_inside_an_outage_waits_for_its_end() -> None:
    scenario = chain_scenario([3.0, 2.0], [1.0, 1.0], trace=stepped(loops=False), bandwidth_bps=1800.0, global_batch=1)
    record = Simulator().run(scenario, chain_plan(scenario), None, steps=1)
    sends = [(e.start_s, e.end_s) for e in record.events if e.kind is EventKind.SEND]
    # 8,000 bits at 2 kbit/s from 5 s on; the last rate holds after the end.
    assert sends == [(3.0, pytest.approx(9.0, rel=EXACT)), (pytest.approx(12.0), pytest.approx(16.0, rel=EXACT))]


def ends_s(*flows: tuple[float, list[Link], float]) -> list[float]:
    """When each flow (start in seconds, links, bits) has left, alone with the others on shared links."""
    links = {link.name: link for _, path, _ in flows for link in path}
    tables = tables_of(links.values())
    numbers = {name: number for number, name in enumerate(links)}
    ends = _ends_on(lambda environment: SharedLinks(environment, tables, numbers, max_min_rates), flows)
    if len(links) == 1:
        # Virtual time and progressive filling are two ways to the same shares.
        assert _ends_on(lambda environment: FairLink(environment, tables, 0), flows) == pytest.approx(ends, rel=1e-8)
    return ends


def tables_of(links: Iterable[Link]) -> RateTables:
    return join_tables(
        [RateTable((0.0,), (link.bandwidth_bps,)) if link.trace is None else link_table(link.trace) for link in links]
    )


def _ends_on(
    make: Callable[[simpy.Environment], SharedLink], flows: Sequence[tuple[float, list[Link], float]]
) -> list[float]:
    environment = simpy.Environment()
    shared = make(environment)
    ends = [inf] * len(flows)
    for index, (start_s, path, bits) in enumerate(flows):
        names = tuple(link.name for link in path)
        flow = Flow(names, bits, 1, inf, partial(ends.__setitem__, index))
        Timer(environment, start_s, lambda _, flow=flow: shared.start(flow))
    environment.run()
    return ends


@settings(max_examples=150)
@given(link_traces(), st.floats(0, 100), st.floats(1, 1e9))
def test_a_lone_flow_takes_what_the_traces_integral_says(trace: LinkTrace, start_s: float, bits: float) -> None:
    # A bit more or less, since one that leaves just as an outage begins may round to its other side.
    least_s, most_s = start_s + trace.time_to_send([bits * (1 - EXACT), bits * (1 + EXACT)], start_s)
    # A trace of outage alone is refused by the cluster; thousands of rounds would only be slow.
    assume(trace.bandwidth_bps.any() and most_s < start_s + 20 * trace.duration_s)
    end_s = ends_s((start_s, [Link("a", "b", 1.0, 0.0, trace)], bits))[0]
    assert least_s * (1 - EXACT) <= end_s <= most_s * (1 + EXACT)


@st.composite
def swaying_links(draw: st.DrawFn) -> Link:
    pieces = draw(st.lists(st.tuples(st.floats(0.1, 3), st.floats(1e3, 1e6)), min_size=1, max_size=8))
    ends = np.cumsum([length_s for length_s, _ in pieces])
    trace = LinkTrace(np.append(0.0, ends[:-1]), np.array([rate for _, rate in pieces]), float(ends[-1]))
    return Link("a", "b", 1.0, 0.0, trace)


# When each comes, seconds, and its bits.
MESSAGES = st.tuples(st.floats(0, 50), st.floats(1, 1e6))


@settings(max_examples=150)
@given(swaying_links(), st.lists(MESSAGES, min_size=2, max_size=8))
def test_virtual_time_shares_a_link_as_progressive_filling_does(
    link: Link, messages: list[tuple[float, float]]
) -> None:
    ends_s(*((start_s, [link], bits) for start_s, bits in messages))


@settings(max_examples=150)
@given(swaying_links(), st.lists(MESSAGES, min_size=1, max_size=8))
def test_whole_messages_queue_as_lindley_says(link: Link, messages: list[tuple[float, float]]) -> None:
    """Each begins when it has come and the one before it has left."""
    assert link.trace is not None
    arrivals = sorted(messages, key=lambda message: message[0])
    expected, free_s = [], 0.0
    for start_s, bits in arrivals:
        begins_s = max(start_s, free_s)
        free_s = begins_s + float(link.trace.time_to_send([bits], begins_s)[0])
        expected.append(free_s)
    tables, flows = tables_of([link]), [(start_s, [link], bits) for start_s, bits in arrivals]
    for make in (
        lambda environment: FifoLink(environment, tables, 0),
        lambda environment: SharedLinks(environment, tables, {link.name: 0}, first_come_rates),
    ):
        assert _ends_on(make, flows) == pytest.approx(expected, rel=1e-8)


@settings(max_examples=100)
@given(swaying_links(), st.lists(MESSAGES, min_size=1, max_size=8))
def test_a_packet_waits_until_all_bytes_before_it_have_left(link: Link, messages: list[tuple[float, float]]) -> None:
    assert link.trace is not None
    environment = simpy.Environment()
    fifo = FifoLink(environment, tables_of([link]), 0)
    waits_s, expected_s, free_s = [], [], 0.0

    def arrive(bits: float) -> None:
        waits_s.append(fifo.leaves_s(environment.now) - environment.now)
        fifo.start(Flow((link.name,), bits, 1, inf, lambda departed_s: None))

    for start_s, bits in sorted(messages, key=lambda message: message[0]):
        Timer(environment, start_s, lambda _, bits=bits: arrive(bits))  # type: ignore[misc]
        expected_s.append(max(0.0, free_s - start_s))
        begins_s = max(start_s, free_s)
        free_s = begins_s + float(link.trace.time_to_send([bits], begins_s)[0])
    environment.run()
    assert waits_s == pytest.approx(expected_s, rel=1e-8, abs=1e-6)


WIDE, OTHER = Link("a", "b", 100.0, 0.0), Link("c", "d", 100.0, 0.0)
NARROW = Link("b", "c", 30.0, 0.0)


def test_two_equal_flows_take_half_a_link_each() -> None:
    assert ends_s((0, [WIDE], 1000), (0, [WIDE], 1000)) == pytest.approx([20, 20], rel=EXACT)


def test_when_a_short_flow_ends_the_long_one_takes_the_whole_link() -> None:
    # 50 bit/s each until 4 s, when the short one is through; the other 800 bits take 8 s.
    assert ends_s((0, [WIDE], 200), (0, [WIDE], 1000)) == pytest.approx([4, 12], rel=EXACT)


def test_a_flow_that_starts_late_slows_the_one_under_way() -> None:
    # 600 bits in 6 s, then 50 bit/s: 400 bits until 14 s; the late one has 200 left and the link to itself.
    assert ends_s((0, [WIDE], 1000), (6, [WIDE], 600)) == pytest.approx([14, 16], rel=EXACT)


def test_a_flow_on_another_link_is_left_alone() -> None:
    assert ends_s((0, [WIDE], 200), (0, [WIDE], 1000), (0, [OTHER], 300))[2] == pytest.approx(3, rel=EXACT)


def test_a_flow_over_two_links_takes_the_narrower_share() -> None:
    # 30 bit/s over the narrow link leave 70 on the wide one: 700 bits in 10 s, and 300 bits in 10 s.
    assert ends_s((0, [WIDE, NARROW], 300), (0, [WIDE], 700)) == pytest.approx([10, 10], rel=EXACT)


def test_shares_follow_a_trace() -> None:
    # Half of 4 kbit/s until 2 s, nothing until 5 s, then half of 2 kbit/s until the short one ends at 7 s.
    link = Link("a", "b", 1800.0, 0.0, stepped(loops=False))
    assert ends_s((0, [link], 6000), (0, [link], 10_000)) == pytest.approx([7, 9], rel=EXACT)


# --- the evaluator --------------------------------------------------------------------------------------------


@settings(max_examples=250)
@given(st.one_of(chains(), with_packets(chains())))
def test_the_evaluator_and_the_simulator_agree_on_chains(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    assert step_time_s(plan, scenario) == pytest.approx(simulated_s(scenario, plan), rel=EXACT)


@settings(max_examples=250)
@given(st.one_of(replicated(), with_packets(replicated())))
def test_the_evaluator_and_the_simulator_agree_on_replicas_with_gradient_sums(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    assert step_time_s(plan, scenario) == pytest.approx(simulated_s(scenario, plan), rel=EXACT)


@settings(max_examples=40)
@given(replicated(), st.integers(1, 3))
def test_each_pair_sends_what_the_programs_say_in_every_step(case: tuple[Scenario, Plan], steps: int) -> None:
    scenario, plan = case
    expected: Counter[tuple[str, str, str]] = Counter()
    for device, program in compile_plan(plan, scenario).items():
        for transfer in (transfer for work in program.work for transfer in work.sends):
            expected[device, transfer.target, str(transfer.kind)] += steps * transfer.size_bytes
        for sync in program.synchronisations:
            for exchange in sync.exchanges(device):
                if exchange.send_to is not None:
                    target = sync.devices[exchange.send_to]
                    expected[device, target, SYNC_ACTION] += steps * 4 * exchange.send_elements
    sent: Counter[tuple[str, str, str]] = Counter()
    for event in Simulator().run(scenario, plan, None, steps).events:
        if event.kind is EventKind.SEND:
            sent[event.device, event.peer, event.action] += event.size_bytes
    assert +sent == +expected
