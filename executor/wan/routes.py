"""Which emulated links lie between each two devices of a plan."""

from collections.abc import Sequence

from executor.wan.emulated_link import EmulatedLink
from planner.scenario.cluster import Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


class LinkPaths:
    """The paths between devices; those that share a link share one queue.

    Args:
        scenario: Its cluster, its outages of links, its seed.
        devices: In rank order.
    """

    def __init__(self, scenario: Scenario, devices: Sequence[str]) -> None:
        self._scenario = scenario
        self._devices = devices
        self._links: dict[str, EmulatedLink] = {}
        self._between = {
            (a, b): tuple(self._emulated(link) for link in self._path(a, b))
            for a in range(len(devices))
            for b in range(len(devices))
            if a != b
        }

    @property
    def links(self) -> list[EmulatedLink]:
        """All links that some path takes."""
        return list(self._links.values())

    def between(self, source: int, target: int) -> tuple[EmulatedLink, ...]:
        """Return the links from one rank to another, none where no link leads there.

        The plan sends nothing there, but the ranks find each other over all connections.
        """
        return self._between.get((source, target), ())

    def _path(self, source: int, target: int) -> tuple[Link, ...]:
        try:
            return self._scenario.cluster.path(self._devices[source], self._devices[target])
        except InputError:
            return ()

    def _emulated(self, link: Link) -> EmulatedLink:
        if link.name not in self._links:
            outages = [
                (fault.start_s, fault.end_s)
                for fault in self._scenario.faults
                if isinstance(fault, LinkOutage) and fault.link == link.name
            ]
            self._links[link.name] = EmulatedLink(link, outages, self._scenario.training.seed)
        return self._links[link.name]
