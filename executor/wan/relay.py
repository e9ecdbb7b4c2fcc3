"""The process that carries packets between the hosts of the test bed as the scenario's links would.

Started as ``python -m executor.wan.relay AGENT_PID JOB_FOLDER TCP``, where TCP is an `executor.core.job.Tcp`, in the
namespace of the control host. When all hosts exist it prints the paths of the devices' network namespaces, in rank
order, as a JSON line; when SIGTERM ends it, it writes a `RelayReport` to the job's folder.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Never

from executor.core.clock import OriginWatch
from executor.core.job import JobFolder, rank_devices
from executor.core.subprocesses import die_with_parent
from executor.wan.emulated_link import EmulatedLink, LinkCount
from executor.wan.linux import (
    HOST_TCP,
    WIDE_AREA,
    as_on,
    enter_new_network,
    open_tun,
    read_tcp,
    set_tcp,
    switch_on_loopback,
)
from executor.wan.packets import InTransitQueue, Route, is_ipv4, target_address
from executor.wan.testbed import INTERFACE, NETMASK, control_address, device_address
from planner.scenario.cluster import Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError, RunError

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


# The largest IPv4 packet and the headers before it.
_MOST_BYTES = 1 << 16 | 64

# Packets that are read from one host before the others have their turn.
_BATCH = 32

# The share of wake-ups whose lateness is reported.
_LATE_SHARE = 0.01

_PR_SET_TIMERSLACK = 29

# The links from one rank to another, by both ranks.
EmulatedPaths = Mapping[tuple[int, int], tuple[EmulatedLink, ...]]


def emulated_paths(scenario: Scenario, devices: Sequence[str]) -> EmulatedPaths:
    """Return the paths between devices, given in rank order. Paths that share a link share its queue.

    There is no path where no link leads. The plan sends nothing there, but the ranks connect to each other.
    """
    links: dict[str, EmulatedLink] = {}

    def emulated(link: Link) -> EmulatedLink:
        if link.name not in links:
            outages = [
                (fault.start_s, fault.end_s)
                for fault in scenario.faults
                if isinstance(fault, LinkOutage) and fault.link == link.name
            ]
            links[link.name] = EmulatedLink(link, outages, scenario.training.seed)
        return links[link.name]

    paths = {}
    for source, target in permutations(range(len(devices)), 2):
        with suppress(InputError):
            paths[source, target] = tuple(map(emulated, scenario.cluster.path(devices[source], devices[target])))
    return paths


class Relay:
    """Reads each packet where it leaves, and writes it where it arrives when it is due.

    Args:
        control: File descriptor of the control host's TUN device, to and from which packets pass at once.
        devices: File descriptors of the devices' TUN devices, in rank order.
        origin: Tells when the run starts.
    """

    def __init__(self, paths: EmulatedPaths, control: int, devices: Sequence[int], origin: OriginWatch) -> None:
        self._links = list(dict.fromkeys(link for path in paths.values() for link in path))
        self._origin = origin
        self._started = False
        self._in_transit = InTransitQueue()
        self._refused_packets = 0
        self._lateness = Lateness()
        ranks = {tun: rank for rank, tun in enumerate(devices)}
        addresses = {control: control_address(), **{tun: device_address(rank) for tun, rank in ranks.items()}}
        self._routes = {
            source: {
                socket.inet_aton(address): Route(paths.get((ranks.get(source, -1), ranks.get(target, -1)), ()), target)
                for target, address in addresses.items()
            }
            for source in addresses
        }

    def forward(self) -> Never:
        """Carry packets until a signal ends the process."""
        in_transit, hosts = self._in_transit, list(self._routes)
        while True:
            now_s = time.monotonic()
            # The lateness of the first packet that is due, which has waited longest.
            if in_transit.next_s <= now_s:
                self._lateness.note(now_s - in_transit.next_s)
            for target, packet in in_transit.arrived(now_s):
                self._write(target, packet)
            due_s = in_transit.next_s
            timeout_s = None if due_s == inf else max(0.0, due_s - time.monotonic())
            readable, _, _ = select.select(hosts, (), (), timeout_s)
            if readable and not self._started:
                self._start_run()
            for source in readable:
                self._read(source)

    def report(self, tcp: dict[str, str], tcp_misses: Sequence[str]) -> RelayReport:
        """Return the report until now, for hosts with these TCP settings."""
        late, counts = self._lateness, tuple(link.count for link in self._links)
        return RelayReport(
            tcp, tuple(tcp_misses), counts, self._refused_packets, late.exceeded_s(_LATE_SHARE), late.largest_s
        )

    def _start_run(self) -> None:
        origin_s = self._origin.origin_s()
        if origin_s is not None:
            self._started = True
            # Lateness while the ranks load torch does not matter.
            self._lateness = Lateness()
            for link in self._links:
                link.start_run(origin_s)

    def _read(self, source: int) -> None:
        routes = self._routes[source]
        for _ in range(_BATCH):
            try:
                packet = os.read(source, _MOST_BYTES)
            except BlockingIOError:
                return
            route = routes.get(target_address(packet)) if is_ipv4(packet) else None
            if route is None:
                continue
            if route.links:
                self._in_transit.put(packet, route, time.monotonic())
            else:
                self._write(route.target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        try:
            os.write(target, packet)
        except OSError:
            self._refused_packets += 1


def main(parent: str, folder: str, tcp: str) -> None:
    """Make the hosts of a job, print where they are, and carry their packets."""
    die_with_parent(int(parent))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # The launcher handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = JobFolder(Path(folder))
    scenario, plan, config = job.read()
    names = rank_devices(scenario, plan, config)
    paths = emulated_paths(scenario, names)
    control = open_tun(INTERFACE, control_address(), NETMASK)
    wanted = WIDE_AREA if tcp == "wide-area" else as_on(json.loads(os.environ[HOST_TCP]))
    tcp_misses: list[str] = []
    devices, namespaces = [], []
    for rank in range(len(names)):
        namespaces.append(enter_new_network())
        switch_on_loopback()
        # The same on all hosts.
        tcp_misses = set_tcp(wanted)
        devices.append(open_tun(INTERFACE, device_address(rank), NETMASK))
    relay = Relay(paths, control, devices, OriginWatch(job.origin))
    # The kernel must wake this process on time, and the interpreter must not pause.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    gc.disable()
    print(json.dumps([f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces]), flush=True)
    try:
        relay.forward()
    except RunError as error:
        job.run_failure.write_text(str(error))
        sys.exit(1)
    finally:
        # This process is still in the network of the last device.
        relay.report(read_tcp(), tcp_misses).write(job.relay_report)


if __name__ == "__main__":
    main(*sys.argv[1:])
