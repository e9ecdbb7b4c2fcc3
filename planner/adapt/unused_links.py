"""The links between regions that a plan does not use, and the probes by which a run measures them.

A plan may be better over links that the present one does not use. How good they are can be had without moving layers:
with a step, a device at one end of such a link sends two probes to one at the other end, a small one, which shows the
delay, and right behind it a large one, which arrives later by the time that its bytes take (the packet pairs of Keshav,
1991). A large probe takes milliseconds on a link of the declared rate, so that delays of the hosts make its rate too
low or too high; it tells reliably that a link has far less than its rate.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache

from planner.check.paths import used_links
from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

# Size of the small probe.
SMALL_BYTES = 40

# A large one consists of packets of this size, as many as the links carry in this time at their declared rates, within
# these bounds.
PACKET_BYTES = 1400
_LARGE_S, _FEWEST_PACKETS, _MOST_PACKETS = 0.002, 4, 64

# Least time between two probes of a path, seconds.
PROBE_EVERY_S = 1.0

# Number of the latest probes of a link of which the least delay, and the highest rate, counts, since load that is not
# ours delays some.
_LATEST = 3


@dataclass(frozen=True, slots=True)
class UnusedPath:
    """What the latest probes show of a path between regions that the plan does not use.

    Attributes:
        latency_s: Propagation delay, seconds.
        rate_bps: Rate at which packets arrived, bits per second; None if no large probe has arrived.
    """

    source: str
    target: str
    latency_s: float
    rate_bps: float | None = None


@lru_cache(maxsize=64)
def unused_paths(plan: Plan, scenario: Scenario) -> tuple[tuple[str, str], ...]:
    """Return pairs (source, target) of devices whose paths together have all links between regions that a plan leaves.

    In each region it is the same device: the first of the plan that sends messages or, without one, the first at all.
    """
    cluster = scenario.cluster
    leaders = [replica.device for replica in plan.replicas]
    present = {name: cluster.by_name[name].region for name in [*leaders, *(each.name for each in cluster.devices)]}
    ends: dict[str, str] = {}
    for name, region in present.items():
        ends.setdefault(region, name)
    left = cluster.wan_links - {link.name for link in used_links(plan, scenario)}
    found = []
    for pair in ((source, target) for source in ends.values() for target in ends.values() if source != target):
        try:
            names = {link.name for link in cluster.path(*pair)}
        except InputError:
            # Nothing leads from the one region to the other.
            continue
        if names & left:
            found.append(pair)
            left -= names
    return tuple(found)


def large_packets(source: str, target: str, scenario: Scenario) -> int:
    """Return the number of packets of a large probe."""
    rate_bps = min(link.bandwidth_bps for link in scenario.cluster.path(source, target))
    return round(min(max(rate_bps * _LARGE_S / (8 * PACKET_BYTES), _FEWEST_PACKETS), _MOST_PACKETS))


def link_probe(source: str, target: str, step: int, size_bytes: int, start_s: float, arrived_s: float) -> Event:
    """Return the row of a probe of ``size_bytes`` that was sent with a step at run second ``start_s``."""
    place = (source, target, -1, -1, -1, step, PROBE_ACTION)
    return Event(EventKind.SEND, *place, start_s, start_s, size_bytes, arrived_s=arrived_s)


def is_link_probe(event: Event) -> bool:
    """Return whether a row is that of a probe of an unused link; those of used ones belong to a pipeline."""
    return event.action == PROBE_ACTION and event.pipeline < 0


class UnusedPaths:
    """Computes what the probes of a run show."""

    def __init__(self) -> None:
        self._delays_s = defaultdict[tuple[str, str], "deque[float]"](lambda: deque(maxlen=_LATEST))
        self._rates_bps = defaultdict[tuple[str, str], "deque[float]"](lambda: deque(maxlen=_LATEST))
        # By path: the latest small probe.
        self._small: dict[tuple[str, str], Event] = {}
        self._seen: set[tuple[str, str]] = set()

    def add(self, probe: Event) -> None:
        """Add a probe that has arrived; a large one comes after the small one of its step."""
        path = probe.device, probe.peer
        if probe.size_bytes == SMALL_BYTES:
            self._small[path] = probe
            self._delays_s[path].append(probe.arrived_s - probe.start_s)
            self._seen.add(path)
        elif (small := self._small.get(path)) is not None and small.step == probe.step:
            took_s = max(probe.arrived_s - small.arrived_s, 1e-9)
            self._rates_bps[path].append(8 * probe.size_bytes / took_s)

    def take(self) -> tuple[UnusedPath, ...]:
        """Return the paths with small probes since the last call, sorted by source and target names."""
        seen, self._seen = sorted(self._seen), set()
        return tuple(
            UnusedPath(*path, min(self._delays_s[path]), max(self._rates_bps[path], default=None)) for path in seen
        )
