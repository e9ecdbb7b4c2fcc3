"""The relay: a process that forwards packets between network namespaces, delayed as the scenario's links would do.

Each device has a network namespace, an emulated host; the agent and the relay are in that of the control host. The
relay is started as ``python -m executor.wan.relay AGENT_PID JOB_FOLDER TCP``, where TCP is an `executor.core.job.Tcp`.
It creates the devices' namespaces, prints their paths in rank order as a JSON line, and forwards packets until SIGTERM
ends it. Then it writes a `RelayReport` to the job's folder.
"""

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

from executor.core.clock import read_origin
from executor.core.job import JobFolder, rank_devices
from executor.core.subprocesses import die_with_parent, end_sleeps_in_time
from executor.wan.emulated_link import EmulatedLink, LinkCount
from executor.wan.linux import (
    HOST_TCP,
    WIDE_AREA,
    as_on,
    dropped_packets,
    enter_new_network,
    open_traffic_counts,
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

# A larger lateness is reported to the user: this is a fifth of the latency of a link across a continent.
TOLERABLE_LATENESS_S = 0.005

# Width and number of the buckets of a histogram of lateness.
_BUCKET_S = 0.001
_BUCKETS = 1000


class Lateness:
    """A histogram, in milliseconds, of how late a relay forwards packets."""

    def __init__(self) -> None:
        self._counts = [0] * (_BUCKETS + 1)
        self.largest_s = 0.0

    def note(self, late_s: float) -> None:
        """Count one lateness in seconds."""
        self._counts[min(_BUCKETS, int(late_s / _BUCKET_S))] += 1
        if late_s > self.largest_s:
            self.largest_s = late_s

    def exceeded_s(self, share: float) -> float:
        """Return the lateness in seconds that a ``share`` of all counts reached or exceeded; at most 1."""
        left = share * sum(self._counts)
        for bucket in range(_BUCKETS, 0, -1):
            left -= self._counts[bucket]
            if left < 0:
                return bucket * _BUCKET_S
        return 0.0


@dataclass(frozen=True, slots=True)
class RelayReport:
    """The report of a relay at its end.

    Attributes:
        tcp: The TCP settings in effect on the emulated hosts, by the kernel's names.
        tcp_misses: A phrase for each setting that differs from the requested one.
        links: Counts of the frames of each link.
        refused_packets: Number of packets that the receiving host did not accept.
        unread_packets: Number of packets that hosts dropped before they came to a link, since the relay was too slow.
        late_s: The lateness in seconds that one wake-up of the relay in a hundred reached or exceeded.
        latest_s: The largest lateness in seconds.
    """

    tcp: dict[str, str]
    tcp_misses: tuple[str, ...]
    links: tuple[LinkCount, ...]
    refused_packets: int
    unread_packets: int
    late_s: float
    latest_s: float

    def write(self, path: Path) -> None:
        """Write the file that `read_report` reads, atomically."""
        write_text_atomically(path, json.dumps(asdict(self)))

    def remarks(self) -> list[str]:
        """Return a sentence for each deviation from the requested network; empty if there is none."""
        remarks = []
        if self.tcp_misses:
            remarks.append(f"TCP on the emulated hosts is not set as asked for: {'; '.join(self.tcp_misses)}")
        if self.late_s > TOLERABLE_LATENESS_S:
            remarks.append(
                f"the relay was {1000 * self.late_s:.0f} ms late or more one time in a hundred, "
                f"{1000 * self.latest_s:.0f} ms at most: the links were slower than the scenario says, since this "
                "machine is too busy"
            )
        dropped = ", ".join(
            f"{link.name} ({link.dropped_frames} of {link.carried_frames + link.dropped_frames})"
            for link in self.links
            if link.dropped_frames
        )
        if dropped:
            remarks.append(f"besides the scenario's loss, packets were dropped since the queue was full: {dropped}")
        if self.refused_packets:
            remarks.append(f"{self.refused_packets} packets were refused by the hosts where they arrived")
        if self.unread_packets:
            remarks.append(
                f"besides the scenario's loss, hosts dropped {self.unread_packets} packets before they came to a link, "
                "since this machine is too busy"
            )
        return remarks


def read_report(path: Path) -> RelayReport:
    """Return the report that a relay has written."""
    data = json.loads(path.read_text())
    links = tuple(LinkCount(**link) for link in data.pop("links"))
    return RelayReport(**{**data, "links": links, "tcp_misses": tuple(data["tcp_misses"])})


# An upper bound for the bytes of an IPv4 packet with its virtio_net_hdr.
_MOST_BYTES = 1 << 16 | 64

# Number of packets that are read from one host before the next host.
_BATCH = 32

# The share of wake-ups whose lateness is reported.
_LATE_SHARE = 0.01


# Maps pairs of ranks, sender and receiver, to the links between them in order.
EmulatedPaths = Mapping[tuple[int, int], tuple[EmulatedLink, ...]]


def emulated_paths(scenario: Scenario, devices: Sequence[str]) -> EmulatedPaths:
    """Return the emulated paths between all devices, given in rank order; paths that share a link share its queue.

    Pairs of devices without a path in the cluster are left out. Their packets arrive at once: plans send no messages
    between them, but gloo connects their ranks.
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
    """Reads each packet from the TUN device of the sending host, and writes it to that of the receiver when it is due.

    Args:
        control: File descriptor of the control host's TUN device; packets from and to this host arrive at once.
        devices: File descriptors of the devices' TUN devices, in rank order.
        origin: Path of the file with second 0 of the run.
    """

    def __init__(self, paths: EmulatedPaths, control: int, devices: Sequence[int], origin: Path) -> None:
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
        """Forward packets until a signal ends the process."""
        in_transit, hosts = self._in_transit, list(self._routes)
        while True:
            now_s = time.monotonic()
            # Of all packets that are due, count only the first one, which has waited longest.
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

    def report(self, tcp: dict[str, str], tcp_misses: Sequence[str], unread_packets: int) -> RelayReport:
        """Return the report of the time until now; the arguments are fields of the report."""
        late = self._lateness
        return RelayReport(
            tcp,
            tuple(tcp_misses),
            tuple(link.count for link in self._links),
            self._refused_packets,
            unread_packets,
            late.exceeded_s(_LATE_SHARE),
            late.largest_s,
        )

    def _start_run(self) -> None:
        origin_s = read_origin(self._origin)
        if origin_s is not None:
            self._started = True
            # Forget lateness from before the run, when the ranks loaded torch.
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
    """Create the emulated hosts of a job, print their paths, and forward their packets."""
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
    devices, namespaces, traffic = [], [], []
    for rank in range(len(names)):
        namespaces.append(enter_new_network())
        switch_on_loopback()
        # The result is the same on all hosts.
        tcp_misses = set_tcp(wanted)
        devices.append(open_tun(INTERFACE, device_address(rank), NETMASK))
        traffic.append(open_traffic_counts())
    relay = Relay(paths, control, devices, job.origin)
    end_sleeps_in_time()
    # Avoid pauses for garbage collection.
    gc.disable()
    print(json.dumps([f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces]), flush=True)
    try:
        relay.forward()
    except RunError as error:
        job.run_failure.write_text(str(error))
        sys.exit(1)
    finally:
        # `read_tcp` reads the settings of the last device's network, in which this process still is.
        unread_packets = sum(dropped_packets(counts, INTERFACE) for counts in traffic)
        relay.report(read_tcp(), tcp_misses, unread_packets).write(job.relay_report)


if __name__ == "__main__":
    main(*sys.argv[1:])
