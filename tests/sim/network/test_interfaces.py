"""Network interfaces of hosts: shared max-min, each way for itself, and as if absent where they can never fill."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events.event import EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from sim.epoch import Epoch, EpochRun
from sim.kernel.advance import SHARED
from sim.recorder import Recorder
from sim.simulator import Simulator
from sim.step_gate import StopCondition
from sim.updates.async_updates import AsyncUpdates
from tests.helpers.scenarios.builders import mesh_scenario
from traces.trace import LinkTrace

EXACT = 1e-9

# Bytes of an activation of one sample: 8000 bits.
SAMPLE_BYTES = 1000
SAMPLE_BITS = 8 * SAMPLE_BYTES


def device(name: str, host: str = "", interface_bps: float = math.inf) -> Device:
    return Device(name, "kind", "region", 2**30, host=host, interface_bps=interface_bps)


def pairs(
    devices: Sequence[Device],
    links: Sequence[Link],
    talking: Sequence[tuple[str, str]],
    *,
    samples: Sequence[int] | None = None,
    forward_s: float = 0.0,
) -> tuple[Scenario, Plan]:
    """A pipeline of two stages for each pair: the first sends an activation, the second its gradient a second later.

    The first stage takes ``forward_s`` a sample for its forward. Nothing is summed over pipelines.
    """
    sizes = list(samples) if samples is not None else [1] * len(talking)
    scenario = mesh_scenario(
        1, [forward_s, 0.0], [0.0, 1.0], output_bytes=[SAMPLE_BYTES, 0], parameter_bytes=[0, 0], global_batch=sum(sizes)
    )
    scenario = replace(scenario, cluster=Cluster(tuple(devices), tuple(links)))
    pipelines = tuple(
        Pipeline((Stage(0, 1, (Replica(sender),), 2), Stage(1, 2, (Replica(receiver),), 1)), (size,))
        for (sender, receiver), size in zip(talking, sizes, strict=True)
    )
    return scenario, Plan(scenario.name, scenario.model.name, "hand", "1f1b", pipelines)


def simulated(case: tuple[Scenario, Plan], steps: int = 1) -> RunRecord:
    return Simulator().run(*case, None, steps)


def lasts_s(record: RunRecord, action: str = "F") -> dict[str, float]:
    """How long each sender's message takes to leave."""
    return {
        event.device: event.end_s - event.start_s
        for event in record.events
        if event.kind is EventKind.SEND and event.action == action
    }


def max_min_ends_s(
    starts_s: Sequence[Fraction], bits: Sequence[int], own_bps: Sequence[int], all_bps: int
) -> list[float]:
    """When each message has left: no more than its own link's rate, together no more than the interface's."""
    left = {index: Fraction(size) for index, size in enumerate(bits)}
    ends: dict[int, Fraction] = {}
    now = min(starts_s)
    while left:
        active = sorted((index for index in left if starts_s[index] <= now), key=lambda index: own_bps[index])
        rates: dict[int, Fraction] = {}
        room = Fraction(all_bps)
        for place, index in enumerate(active):
            # Whoever wants less than an equal share of what is left gets all that it wants.
            rates[index] = min(Fraction(own_bps[index]), room / (len(active) - place))
            room -= rates[index]
        next_s = min(
            [*(now + left[index] / rates[index] for index in active), *(each for each in starts_s if each > now)]
        )
        for index in active:
            left[index] -= rates[index] * (next_s - now)
            if not left[index]:
                ends[index] = next_s
                del left[index]
        now = next_s
    return [float(ends[index]) for index in range(len(bits))]


@st.composite
def fans(draw: st.DrawFn) -> tuple[list[int], list[int], float]:
    """Rates of the links of one host's devices, samples that each sends, seconds per sample until it sends."""
    rates = draw(st.lists(st.integers(100, 100_000), min_size=1, max_size=5))
    sizes = draw(st.lists(st.integers(1, 9), min_size=len(rates), max_size=len(rates)))
    return rates, sizes, draw(st.sampled_from([0.0, 0.125, 2.0]))


def fan(case: tuple[list[int], list[int], float], interface_bps: float, *, inwards: bool) -> tuple[Scenario, Plan]:
    """A host's devices send to devices elsewhere, or those to them."""
    rates, sizes, forward_s = case
    inside = [device(f"in-{index}", "box", interface_bps) for index in range(len(rates))]
    outside = [device(f"out-{index}") for index in range(len(rates))]
    talking = [
        (outer.name, inner.name) if inwards else (inner.name, outer.name)
        for inner, outer in zip(inside, outside, strict=True)
    ]
    links = [
        Link(*ends, float(rate), 0.5) for pair, rate in zip(talking, rates, strict=True) for ends in (pair, pair[::-1])
    ]
    return pairs([*inside, *outside], links, talking, samples=sizes, forward_s=forward_s)


@settings(max_examples=150)
@given(fans(), st.integers(50, 200_000), st.booleans())
def test_an_interface_is_shared_max_min(
    case: tuple[list[int], list[int], float], interface_bps: int, inwards: bool
) -> None:
    rates, sizes, forward_s = case
    starts_s = [Fraction(forward_s) * size for size in sizes]
    expected = max_min_ends_s(starts_s, [SAMPLE_BITS * size for size in sizes], rates, interface_bps)
    record = simulated(fan(case, float(interface_bps), inwards=inwards))
    ends = {e.pipeline: e.end_s for e in record.events if e.kind is EventKind.SEND and e.action == "F"}
    assert [ends[index] for index in range(len(rates))] == pytest.approx(expected, rel=EXACT)


@settings(max_examples=60)
@given(fans(), st.integers(0, 1000), st.booleans())
def test_an_interface_that_can_never_fill_changes_nothing(
    case: tuple[list[int], list[int], float], more_bps: int, inwards: bool
) -> None:
    without = fan(case, math.inf, inwards=inwards)
    wide = fan(case, float(sum(case[0]) + more_bps), inwards=inwards)
    assert simulated(wide, 2).events == simulated(without, 2).events
    assert step_time_s(wide[1], wide[0]) == step_time_s(without[1], without[0])
    # Nor does it cost anything: no line needs events.
    scenario, plan = wide
    epoch_run = EpochRun(
        scenario, Epoch(plan), None, StopCondition(1), Recorder(plan.devices), AsyncUpdates(plan.synchronisation, 1)
    )
    assert (epoch_run.network.lines.mode != SHARED).all()


@settings(max_examples=60)
@given(fans(), st.booleans())
def test_one_that_would_fill_only_if_all_sent_at_once_is_looked_at(
    case: tuple[list[int], list[int], float], inwards: bool
) -> None:
    # One bit per second short of all links together: only if all of them send at a time is anybody slower.
    rates, sizes, forward_s = case
    narrow_bps = max(1, sum(rates) - 1)
    starts_s = [Fraction(forward_s) * size for size in sizes]
    expected = max_min_ends_s(starts_s, [SAMPLE_BITS * size for size in sizes], rates, narrow_bps)
    record = simulated(fan(case, float(narrow_bps), inwards=inwards))
    ends = {e.pipeline: e.end_s for e in record.events if e.kind is EventKind.SEND and e.action == "F"}
    assert [ends[index] for index in range(len(rates))] == pytest.approx(expected, rel=EXACT)


# --- by hand --------------------------------------------------------------------------------------------------

BOX = [device("a0", "box", 8000.0), device("a1", "box", 8000.0)]
INSIDE_REGION = Link("region", "region", 1e9, 0.0)


def test_two_devices_of_a_host_get_half_each() -> None:
    case = pairs([*BOX, device("b"), device("c")], [INSIDE_REGION], [("a0", "b"), ("a1", "c")])
    assert lasts_s(simulated(case)) == pytest.approx({"a0": 2.0, "a1": 2.0}, rel=EXACT)


def test_devices_of_different_hosts_do_not_share() -> None:
    alone = [device("a0", interface_bps=8000.0), device("a1", interface_bps=8000.0)]
    case = pairs([*alone, device("b"), device("c")], [INSIDE_REGION], [("a0", "b"), ("a1", "c")])
    assert lasts_s(simulated(case)) == pytest.approx({"a0": 1.0, "a1": 1.0}, rel=EXACT)


def test_out_and_in_do_not_share() -> None:
    case = pairs([*BOX, device("b"), device("c")], [INSIDE_REGION], [("a0", "b"), ("c", "a1")])
    record = simulated(case)
    assert lasts_s(record) == pytest.approx({"a0": 1.0, "c": 1.0}, rel=EXACT)
    # The gradients come a second later, both ways again.
    assert lasts_s(record, "B") == pytest.approx({"b": 1.0, "a1": 1.0}, rel=EXACT)
    assert step_time_s(case[1], case[0]) == pytest.approx(3.0, rel=EXACT)


def test_what_the_other_end_leaves_goes_to_the_others() -> None:
    # Host b takes 2 kbit/s in: the device that sends there leaves 6 of 8 kbit/s to the other for 4/3 s.
    case = pairs([*BOX, device("b", interface_bps=2000.0), device("c")], [INSIDE_REGION], [("a0", "b"), ("a1", "c")])
    assert lasts_s(simulated(case)) == pytest.approx({"a0": 4.0, "a1": 4 / 3}, rel=EXACT)


def test_inside_the_host_the_interface_is_not_used() -> None:
    inner = [*BOX, device("a2", "box", 8000.0), device("a3", "box", 8000.0), device("b")]
    links = [INSIDE_REGION, Link("box", "box", 16_000.0, 0.0)]
    case = pairs([*inner], links, [("a0", "a1"), ("a2", "b")])
    assert lasts_s(simulated(case)) == pytest.approx({"a0": 0.5, "a2": 1.0}, rel=EXACT)
    # Two pairs inside share what is inside.
    both = pairs(inner, links, [("a0", "a1"), ("a2", "a3")])
    assert lasts_s(simulated(both)) == pytest.approx({"a0": 1.0, "a2": 1.0}, rel=EXACT)


def test_a_link_between_hosts_is_shared_by_their_devices_below_the_interface() -> None:
    tower = [device("b0", "tower", 64_000.0), device("b1", "tower", 64_000.0)]
    links = [Link("box", "tower", 4000.0, 0.25), Link("tower", "box", 4000.0, 0.25)]
    record = simulated(pairs([*BOX, *tower], links, [("a0", "b0"), ("a1", "b1")]))
    assert lasts_s(record) == pytest.approx({"a0": 4.0, "a1": 4.0}, rel=EXACT)
    arrivals = [e.end_s for e in record.events if e.kind is EventKind.RECEIVE and e.action == "F"]
    assert arrivals == pytest.approx([4.25, 4.25], rel=EXACT)


def test_an_interface_clips_a_link_whose_rate_changes() -> None:
    trace = LinkTrace(np.array([0.0, 2.0]), np.array([1000.0, 32_000.0]), 4.0, None, loops=True)
    links = [Link("a0", "b", trace.mean_bps, 0.0, trace), Link("b", "a0", 1e9, 0.0)]
    case = pairs([BOX[0], device("b")], links, [("a0", "b")], samples=[3])
    # 2 kbit until 2 s, 8 kbit/s until 4 s, 2 kbit until 6 s, and 4 kbit at 8 kbit/s.
    assert lasts_s(simulated(case)) == pytest.approx({"a0": 6.5}, rel=EXACT)
    # A second device, whose link is steady and wide, gets 7 of 8 kbit/s for 2 s, then 4 until the first is through.
    both = pairs(
        [*BOX, device("b"), device("c")],
        [*links, Link("a1", "c", 1e9, 0.0), Link("c", "a1", 1e9, 0.0)],
        [("a0", "b"), ("a1", "c")],
        samples=[1, 3],
    )
    # First: 2 kbit by 2 s, 6 kbit at 4 kbit/s by 3.5 s. Second: 14 kbit by 2 s, 6 by 3.5 s, and 4 at 8 kbit/s by 4 s.
    assert lasts_s(simulated(both)) == pytest.approx({"a0": 3.5, "a1": 4.0}, rel=EXACT)
