"""The process that carries packets between the hosts of the test bed as the scenario's links would.

Started as ``python -m executor.wan.relay AGENT_PID JOB_FOLDER TCP``, the last a `executor.core.job.Tcp`, in the
namespace of the control host. Once all hosts are there it writes the paths of the devices' network namespaces, in rank
order, as a JSON line to its output; at the end, by SIGTERM, it leaves a `RelayReport` in the job's folder.
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
from collections.abc import Sequence
from math import inf
from pathlib import Path
from types import FrameType
from typing import Never

from executor.core.clock import OriginWatch
from executor.core.job import JobFolder, rank_devices
from executor.core.subprocesses import die_with_parent
from executor.wan.emulated_link import EmulatedLink
from executor.wan.linux import enter_new_network, open_tun, switch_on_loopback
from executor.wan.packets import InTransitQueue, Route, is_ipv4, target_address
from executor.wan.report import Lateness, RelayReport, count_links
from executor.wan.tcp_settings import HOST_TCP, WIDE_AREA, as_on, read_tcp, set_tcp
from executor.wan.testbed import INTERFACE, NETMASK, control_address, device_address
from planner.scenario.cluster import Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError, RunError


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


# The largest packet of IPv4 and what stands before it.
_MOST_BYTES = 1 << 16 | 64

# So many packets of one host before the others have their turn.
_BATCH = 32

# Of the lateness that is reported.
_LATE_SHARE = 0.01

_PR_SET_TIMERSLACK = 29


class Relay:
    """Reads each packet where it leaves, and writes it where it arrives when it is due.

    Args:
        paths: The links between each two devices.
        control: TUN device of the control host, to and from which packets pass at once.
        devices: TUN devices in rank order.
        origin: Says when the run starts.
    """

    def __init__(self, paths: LinkPaths, control: int, devices: Sequence[int], origin: OriginWatch) -> None:
        self._links = paths.links
        self._origin = origin
        self._started = False
        self._carriage = InTransitQueue()
        self._refused_packets = 0
        self._lateness = Lateness()
        hosts = {control: control_address(), **{tun: device_address(rank) for rank, tun in enumerate(devices)}}
        ranks = {tun: rank for rank, tun in enumerate(devices)}
        self._routes: dict[int, dict[bytes, Route]] = {source: {} for source in hosts}
        for source, routes in self._routes.items():
            for target, address in hosts.items():
                links: tuple[EmulatedLink, ...] = ()
                if source in ranks and target in ranks:
                    links = paths.between(ranks[source], ranks[target])
                routes[socket.inet_aton(address)] = Route(links, target)

    def forward(self) -> Never:
        """Carry packets until the process is told to stop."""
        carriage, hosts = self._carriage, list(self._routes)
        while True:
            now_s = time.monotonic()
            # Of the packets that are due the first, which waited longest.
            if carriage.next_s <= now_s:
                self._lateness.note(now_s - carriage.next_s)
            for target, packet in carriage.arrived(now_s):
                self._write(target, packet)
            due_s = carriage.next_s
            timeout_s = None if due_s == inf else max(0.0, due_s - time.monotonic())
            readable, _, _ = select.select(hosts, (), (), timeout_s)
            if readable and not self._started:
                self._start_run()
            for source in readable:
                self._read(source)

    def report(self, tcp: dict[str, str], tcp_misses: Sequence[str]) -> RelayReport:
        """Return what was carried until now, over hosts whose TCP is set like that."""
        late = self._lateness
        counts = count_links(self._links)
        return RelayReport(
            tcp, tuple(tcp_misses), counts, self._refused_packets, late.exceeded_s(_LATE_SHARE), late.largest_s
        )

    def _start_run(self) -> None:
        origin_s = self._origin.origin_s()
        if origin_s is not None:
            self._started = True
            # While the ranks load torch nobody minds.
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
            if not is_ipv4(packet):
                continue
            route = routes.get(target_address(packet))
            if route is None:
                continue
            if route.links:
                self._carriage.take(packet, route, time.monotonic())
            else:
                self._write(route.target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        try:
            os.write(target, packet)
        except OSError:
            self._refused_packets += 1


def main(parent: str, folder: str, tcp: str) -> None:
    """Make the hosts of a job, say where they are, and carry their packets."""
    die_with_parent(int(parent))
    signal.signal(signal.SIGTERM, _stop)
    # Ctrl-C is for the launcher.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = JobFolder(Path(folder))
    scenario, plan, orders = job.read()
    names = rank_devices(scenario, plan, orders)
    paths = LinkPaths(scenario, names)
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
    _be_punctual()
    print(json.dumps([f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces]), flush=True)
    try:
        relay.forward()
    except RunError as error:
        job.run_failure.write_text(str(error))
        sys.exit(1)
    finally:
        # This process is still in the network of the last device.
        relay.report(read_tcp(), tcp_misses).write(job.relay_report)


def _be_punctual() -> None:
    """Have the kernel wake this process when it asks to be woken, and the interpreter never pause."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    gc.disable()


def _stop(signum: int, frame: FrameType | None) -> Never:
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
