"""The links between regions that a plan does not use, and the probes by which a run measures them.

A plan may be better over links that the present one does not use. How good they are can be had without moving layers:
with a step, a device at one end of such a link sends two probes to one at the other end, a small one, which shows the
delay, and right behind it a large one, which arrives later by the time that its bytes take (the packet pairs of Keshav,
1991). Hosts, too, take a few milliseconds for them: a pair that comes within `HOSTS_S` tells nothing of the rate, and
others tell that a link has far less than its rate.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product

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

# Longest time that hosts are taken to need for a large probe, seconds; 64 packets on loopback take 0.3 to 1 ms.
HOSTS_S = 0.005

# Least time between two small probes, and between two large ones, of a path, seconds. At 400 Mbit/s and a price of 0.09
# USD per GB those of an hour cost 0.003 USD.
_SMALL_EVERY_S, _LARGE_EVERY_S = 1.0, 10.0

# Most paths that are probed with one step.
_MOST_PATHS = 64

# Number of the latest probes of a link of which the least delay, and the highest rate, counts, since load that is not
# ours delays some; older ones, seconds, do not count.
_LATEST, _OLD_S = 3, 60.0

# Number of the latest small probes of a path whose large ones are awaited.
_MOST_AWAITED = 300


@dataclass(frozen=True, slots=True)
class UnusedPath:
    """What the latest probes show of a path between regions that the plan does not use.

    Attributes:
        latency_s: Propagation delay, seconds.
        rate_bps: Rate at which packets arrived, bits per second; None if no large probe has arrived in the last minute,
            or one so soon that hosts have decided when.
    """

    source: str
    target: str
    latency_s: float
    rate_bps: float | None = None


@lru_cache(maxsize=64)
def unused_paths(plan: Plan, scenario: Scenario, present: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs (source, target) of devices whose paths together have all links between regions that a plan leaves.

    Only devices in ``present`` take part. One device stands for its region: the first of the plan that sends messages
    or, without one, the first at all. Others take part only for links that no path between these has.
    """
    cluster = scenario.cluster
    names = [replica.device for replica in plan.replicas]
    names = [name for name in dict.fromkeys([*names, *(each.name for each in cluster.devices)]) if name in present]
    ends = {cluster.by_name[name].region: name for name in reversed(names)}
    left = set(cluster.wan_links - {link.name for link in used_links(plan, scenario)})
    found = []

    def probe(source: str, target: str) -> None:
        try:
            crossed = {link.name for link in cluster.path(source, target)}
        except InputError:
            # Nothing leads from the one to the other.
            return
        if crossed & left:
            found.append((source, target))
            left.difference_update(crossed)

    for pair in permutations((ends[region] for region in cluster.regions if region in ends), 2):
        probe(*pair)
    at: dict[str, list[str]] = {}
    for name in names:
        device = cluster.by_name[name]
        for place in dict.fromkeys((name, device.machine, device.region)):
            at.setdefault(place, []).append(name)
    for link in [link for link in cluster.links if link.name in left]:
        for pair in product(at.get(link.source, ()), at.get(link.target, ())):
            if link.name not in left:
                break
            probe(*pair)
    return tuple(found)


def probed_with(step: int, paths: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the paths that are probed with a step: all in turn, at most `_MOST_PATHS` with each step."""
    turns = max(1, math.ceil(len(paths) / _MOST_PATHS))
    return paths[step % turns :: turns]


def large_packets(source: str, target: str, scenario: Scenario) -> int:
    """Return the number of packets of a large probe."""
    rate_bps = min(link.bandwidth_bps for link in scenario.cluster.path(source, target))
    return round(min(max(rate_bps * _LARGE_S / (8 * PACKET_BYTES), _FEWEST_PACKETS), _MOST_PACKETS))


class ProbeTimes:
    """When paths were probed last: by it both backends send the same probes."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        # By path and size, run seconds.
        self._sent_s: dict[tuple[str, str, int], float] = {}

    def take_due(self, source: str, target: str, now_s: float) -> tuple[int, ...]:
        """Return the sizes of the probes of a path that are sent now, bytes: none, a small one, or a large one too."""
        due: list[int] = []
        large_bytes = PACKET_BYTES * large_packets(source, target, self._scenario)
        for size_bytes, every_s in ((SMALL_BYTES, _SMALL_EVERY_S), (large_bytes, _LARGE_EVERY_S)):
            if now_s < self._sent_s.get((source, target, size_bytes), -math.inf) + every_s:
                break
            self._sent_s[source, target, size_bytes] = now_s
            due.append(size_bytes)
        return tuple(due)


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
        # By path: when each of the latest probes arrived, run seconds, with its delay or rate.
        self._delays_s = defaultdict[tuple[str, str], "deque[tuple[float, float]]"](lambda: deque(maxlen=_LATEST))
        self._rates_bps = defaultdict[tuple[str, str], "deque[tuple[float, float]]"](lambda: deque(maxlen=_LATEST))
        # By path and step: when the small probe arrived, run seconds. Its large one may come many steps later.
        self._small_s = defaultdict[tuple[str, str], dict[int, float]](dict)
        self._seen: set[tuple[str, str]] = set()

    def add(self, probes: Iterable[Event]) -> None:
        """Add probes that have arrived."""
        for probe in sorted(probes, key=lambda each: (each.arrived_s, each.size_bytes)):
            path, small_s = (probe.device, probe.peer), self._small_s[probe.device, probe.peer]
            if probe.size_bytes == SMALL_BYTES:
                self._delays_s[path].append((probe.arrived_s, probe.arrived_s - probe.start_s))
                self._seen.add(path)
                small_s[probe.step] = probe.arrived_s
                while len(small_s) > _MOST_AWAITED:
                    del small_s[next(iter(small_s))]
            elif probe.step in small_s:
                took_s = probe.arrived_s - small_s[probe.step]
                rate_bps = 8 * probe.size_bytes / took_s if took_s > HOSTS_S else math.inf
                self._rates_bps[path].append((probe.arrived_s, rate_bps))

    def take(self) -> tuple[UnusedPath, ...]:
        """Return the paths with small probes since the last call, sorted by source and target names."""
        seen, self._seen = sorted(self._seen), set()
        found = []
        for path in seen:
            since_s = self._delays_s[path][-1][0] - _OLD_S
            delays_s, rates_bps = (
                [value for arrived_s, value in each[path] if arrived_s >= since_s]
                for each in (self._delays_s, self._rates_bps)
            )
            rate_bps = max(rates_bps, default=math.inf)
            found.append(UnusedPath(*path, min(delays_s), rate_bps if rate_bps < math.inf else None))
        return tuple(found)
