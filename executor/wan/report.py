"""What a relay leaves: how its hosts' TCP was set, what each link carried, and how late packets were handed on."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.wan.emulated_link import EmulatedLink
from traces.common.atomic import write_text_atomically

# More than this is felt: a fifth of the latency of a link across a continent.
TOLERABLE_LATENESS_S = 0.005

_BUCKET_S = 0.001
_BUCKETS = 1000


class Lateness:
    """How late a relay came to the packets that were due, by milliseconds; as cheap as an addition.

    Attributes:
        largest_s: Seconds.
    """

    def __init__(self) -> None:
        self._counts = [0] * (_BUCKETS + 1)
        self.largest_s = 0.0

    def note(self, late_s: float) -> None:
        """Take note that packets were handed on so late, seconds."""
        self._counts[min(_BUCKETS, int(late_s / _BUCKET_S))] += 1
        if late_s > self.largest_s:
            self.largest_s = late_s

    def exceeded_s(self, share: float) -> float:
        """Return what was reached or exceeded by the latest ``share`` of all, seconds; 1 s if it was more."""
        left = share * sum(self._counts)
        for bucket in range(_BUCKETS, 0, -1):
            left -= self._counts[bucket]
            if left < 0:
                return bucket * _BUCKET_S
        return 0.0


@dataclass(frozen=True, slots=True)
class LinkCount:
    """What one link carried, see `executor.wan.emulated_link.EmulatedLink`."""

    name: str
    carried_frames: int
    carried_bytes: int
    dropped_frames: int
    lost_frames: int


@dataclass(frozen=True, slots=True)
class RelayReport:
    """What a relay did.

    Attributes:
        tcp: The settings in effect on its hosts, by the kernel's names.
        tcp_misses: What of these is otherwise than asked for: phrases.
        links: All that some path takes.
        refused_packets: Not taken where they arrived.
        late_s: One wake-up in a hundred came so late or later, during the run, seconds.
        latest_s: The latest, seconds.
    """

    tcp: dict[str, str]
    tcp_misses: tuple[str, ...]
    links: tuple[LinkCount, ...]
    refused_packets: int
    late_s: float
    latest_s: float

    def write(self, path: Path) -> None:
        """Write what `read_report` reads, whole or not at all."""
        write_text_atomically(path, json.dumps(asdict(self)))

    def remarks(self) -> list[str]:
        """Return what a person has to know to judge the run, a sentence each; none if all went as asked for."""
        remarks = []
        if self.tcp_misses:
            remarks.append(f"TCP on the emulated hosts is not set as asked for: {'; '.join(self.tcp_misses)}")
        if self.late_s > TOLERABLE_LATENESS_S:
            remarks.append(
                f"the relay was {1000 * self.late_s:.0f} ms late or more one time in a hundred, "
                f"{1000 * self.latest_s:.0f} ms at most: this machine is too busy for these links, which were slower"
            )
        dropped = [link for link in self.links if link.dropped_frames]
        if dropped:
            named = ", ".join(f"{link.name} ({_share(link)})" for link in dropped)
            remarks.append(f"packets were dropped, beside a link's own loss, where its queue was full: {named}")
        if self.refused_packets:
            remarks.append(f"{self.refused_packets} packets were refused by the hosts where they arrived")
        return remarks


def read_report(path: Path) -> RelayReport:
    """Return what a relay has left."""
    data = json.loads(path.read_text())
    links = tuple(LinkCount(**link) for link in data.pop("links"))
    return RelayReport(**{**data, "links": links, "tcp_misses": tuple(data["tcp_misses"])})


def count_links(links: Sequence[EmulatedLink]) -> tuple[LinkCount, ...]:
    """Return what links have carried until now."""
    return tuple(
        LinkCount(link.name, link.carried_frames, link.carried_bytes, link.dropped_frames, link.lost_frames)
        for link in links
    )


def _share(link: LinkCount) -> str:
    return f"{link.dropped_frames} of {link.carried_frames + link.dropped_frames}"
