"""The links between regions that a plan does not use, and the probes by which a run measures their propagation delay.

A plan may be better over links that the present one does not use, and how good they are shows only in use. Their delay
can be had for less: with each step, a device at one end of such a link sends a datagram to one at the other end. Rates
cannot be measured without load.
"""

from collections import defaultdict, deque
from functools import lru_cache

from planner.check.paths import used_links
from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

# Size of the datagram: step, time and sender in 20 bytes, and as many by which the receiver knows that it is genuine.
LINK_PROBE_BYTES = 40

# Number of the latest probes of a link of which the least delay counts, since load that is not ours delays some.
_LATEST = 3

# A path that the plan does not use, and its delay, as (source, target, seconds).
UnusedPath = tuple[str, str, float]


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


def link_probe(source: str, target: str, step: int, start_s: float, arrived_s: float) -> Event:
    """Return the row of a probe that was sent with a step at run second ``start_s``."""
    place = (source, target, -1, -1, -1, step, PROBE_ACTION)
    return Event(EventKind.SEND, *place, start_s, start_s, LINK_PROBE_BYTES, arrived_s=arrived_s)


def is_link_probe(event: Event) -> bool:
    """Return whether a row is that of a probe of an unused link; those of used ones belong to a pipeline."""
    return event.action == PROBE_ACTION and event.pipeline < 0


class UnusedDelays:
    """The delays of unused paths, from the rows of a run."""

    def __init__(self) -> None:
        self._latest_s = defaultdict[tuple[str, str], "deque[float]"](lambda: deque(maxlen=_LATEST))
        self._seen: set[tuple[str, str]] = set()

    def add(self, probe: Event) -> None:
        """Add a probe that has arrived."""
        path = probe.device, probe.peer
        self._latest_s[path].append(probe.arrived_s - probe.start_s)
        self._seen.add(path)

    def take(self) -> tuple[UnusedPath, ...]:
        """Return the paths with probes since the last call, sorted by source and target names."""
        seen, self._seen = sorted(self._seen), set()
        return tuple((*path, min(self._latest_s[path])) for path in seen)
