"""How long one step of a plan takes on steady links: the quick judge of candidate plans.

Each ordered device pair is a channel of its own that carries one transfer at a time. On constant links that no
two channels share, this is exactly what the simulator's events give; a test holds the two together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.plan import Plan
from planner.program import DeviceProgram, GradientSync, Transfer, compile_plan
from planner.ring import ring_exchanges
from planner.scenario import Scenario
from traces.errors import InputError


@dataclass(frozen=True, slots=True)
class SteadyPath:
    """A path whose rate does not change.

    Attributes:
        rate_bps: Bits per second.
        latency_s: One way, seconds.
    """

    rate_bps: float
    latency_s: float


def nominal_path(scenario: Scenario, source: str, target: str) -> SteadyPath:
    """Return the path between two devices at the bandwidths that the cluster declares."""
    links = scenario.cluster.path(source, target)
    return SteadyPath(min(link.bandwidth_bps for link in links), sum(link.latency_s for link in links))


def step_time_s(
    plan: Plan,
    scenario: Scenario,
    path: Callable[[str, str], SteadyPath] | None = None,
    slowdown: Mapping[str, float] | None = None,
) -> float:
    """Return the makespan of one step in seconds.

    Args:
        plan: A checked plan.
        scenario: What it is for.
        path: The path from one device to another; the declared bandwidths and latencies if None.
        slowdown: Device to the factor by which its compute takes longer than profiled.

    Raises:
        InputError: The order of actions deadlocks.
    """
    find_path = path or (lambda source, target: nominal_path(scenario, source, target))
    programs = compile_plan(plan, scenario)
    clock_s = dict.fromkeys(programs, 0.0)
    position = dict.fromkeys(programs, 0)
    channel_free_s: dict[tuple[str, str], float] = {}
    arrival_s: dict[Transfer, float] = {}
    waiting_for: dict[Transfer, str] = {}
    ready = list(programs)
    while ready:
        device = ready.pop()
        program = programs[device]
        factor = (slowdown or {}).get(device, 1.0)
        while position[device] < len(program.work):
            work = program.work[position[device]]
            missing = next((transfer for transfer in work.receives if transfer not in arrival_s), None)
            if missing is not None:
                waiting_for[missing] = device
                break
            start_s = max([clock_s[device], *(arrival_s[transfer] for transfer in work.receives)])
            clock_s[device] = start_s + work.duration_s * factor
            position[device] += 1
            for transfer in work.sends:
                steady = find_path(device, transfer.target)
                channel = (device, transfer.target)
                begin_s = max(clock_s[device], channel_free_s.get(channel, 0.0))
                channel_free_s[channel] = begin_s + 8 * transfer.size_bytes / steady.rate_bps
                arrival_s[transfer] = channel_free_s[channel] + steady.latency_s
                if transfer in waiting_for:
                    ready.append(waiting_for.pop(transfer))
    _refuse_deadlock(programs, position)
    for sync in dict.fromkeys(sync for program in programs.values() for sync in program.synchronisations):
        _run_ring(sync, clock_s, channel_free_s, scenario.training.element_bytes, find_path)
    return max(clock_s.values())


def _refuse_deadlock(programs: Mapping[str, DeviceProgram], position: Mapping[str, int]) -> None:
    for device, program in programs.items():
        if position[device] < len(program.work):
            action = program.work[position[device]].action
            raise InputError(f"the order of actions deadlocks: device '{device}' never gets what {action} needs")


def _run_ring(
    sync: GradientSync,
    clock_s: dict[str, float],
    channel_free_s: dict[tuple[str, str], float],
    element_bytes: int,
    find_path: Callable[[str, str], SteadyPath],
) -> None:
    """Advance the clocks of the devices of one gradient sum, exchange by exchange."""
    count = len(sync.devices)
    exchanges = [ring_exchanges(sync.elements, count, position) for position in range(count)]
    for turn in range(2 * (count - 1)):
        arrivals_s = []
        for position, device in enumerate(sync.devices):
            following = sync.devices[(position + 1) % count]
            first, end = exchanges[position][turn].send
            steady = find_path(device, following)
            channel = (device, following)
            begin_s = max(clock_s[device], channel_free_s.get(channel, 0.0))
            channel_free_s[channel] = begin_s + 8 * (end - first) * element_bytes / steady.rate_bps
            arrivals_s.append(channel_free_s[channel] + steady.latency_s)
        for position, device in enumerate(sync.devices):
            clock_s[device] = max(clock_s[device], arrivals_s[position - 1])
