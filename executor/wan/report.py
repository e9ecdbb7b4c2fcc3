"""What a relay reports: the TCP settings of its hosts, what each link carried, and how late packets were."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.wan.emulated_link import LinkCount
from traces.common.atomic import write_text_atomically

# Later than this is worth a remark: a fifth of the latency of a link across a continent.
TOLERABLE_LATENESS_S = 0.005

_BUCKET_S = 0.001
_BUCKETS = 1000


class Lateness:
    """A histogram of how late a relay forwards packets, by milliseconds; noting a packet is as cheap as an addition."""

    def __init__(self) -> None:
        self._counts = [0] * (_BUCKETS + 1)
        self.largest_s = 0.0

    def note(self, late_s: float) -> None:
        """Add one lateness, seconds."""
        self._counts[min(_BUCKETS, int(late_s / _BUCKET_S))] += 1
        if late_s > self.largest_s:
            self.largest_s = late_s

    def exceeded_s(self, share: float) -> float:
        """Return the lateness that the latest ``share`` of all reached or exceeded, seconds; at most 1 s."""
        left = share * sum(self._counts)
        for bucket in range(_BUCKETS, 0, -1):
            left -= self._counts[bucket]
            if left < 0:
                return bucket * _BUCKET_S
        return 0.0


@dataclass(frozen=True, slots=True)
class RelayReport:
    """What a relay did.

    Attributes:
        tcp: The TCP settings in effect on its hosts, by the kernel's names.
        tcp_misses: Phrases that name each setting which differs from what was asked for.
        refused_packets: Number of packets that the receiving host did not accept.
        late_s: The lateness that one wake-up in a hundred reached or exceeded during the run, seconds.
    """

    tcp: dict[str, str]
    tcp_misses: tuple[str, ...]
    links: tuple[LinkCount, ...]
    refused_packets: int
    late_s: float
    latest_s: float

    def write(self, path: Path) -> None:
        """Write the file that `read_report` reads, atomically."""
        write_text_atomically(path, json.dumps(asdict(self)))

    def remarks(self) -> list[str]:
        """Return sentences on what a reader must know to judge the run; empty if all went as asked for."""
        remarks = []
        if self.tcp_misses:
            remarks.append(f"TCP on the emulated hosts is not set as asked for: {'; '.join(self.tcp_misses)}")
        if self.late_s > TOLERABLE_LATENESS_S:
            remarks.append(
                f"the relay was {1000 * self.late_s:.0f} ms late or more one time in a hundred, "
                f"{1000 * self.latest_s:.0f} ms at most: this machine is too busy for these links, which were slower"
            )
        dropped = ", ".join(
            f"{link.name} ({link.dropped_frames} of {link.carried_frames + link.dropped_frames})"
            for link in self.links
            if link.dropped_frames
        )
        if dropped:
            remarks.append(f"packets were dropped, beside a link's own loss, where its queue was full: {dropped}")
        if self.refused_packets:
            remarks.append(f"{self.refused_packets} packets were refused by the hosts where they arrived")
        return remarks


def read_report(path: Path) -> RelayReport:
    """Return the report that a relay has written."""
    data = json.loads(path.read_text())
    links = tuple(LinkCount(**link) for link in data.pop("links"))
    return RelayReport(**{**data, "links": links, "tcp_misses": tuple(data["tcp_misses"])})
