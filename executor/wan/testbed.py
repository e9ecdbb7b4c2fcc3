"""Runs the relay, the process that emulates a job's links, and moves each rank into its emulated host."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from executor.core.job import JobFolder, Tcp
from executor.core.subprocesses import end, python_environment
from executor.wan.linux import enter_network
from traces.common.errors import RunError

# Name of the network interface in the namespace of each emulated host.
INTERFACE = "wan0"

# The emulated network, 10.99.0.0/16, in which the control host has number 1; it exists in these namespaces only.
NETMASK = "255.255.0.0"
_NETWORK = "10.99"
_CONTROL = 1
_MOST_HOSTS = 1 << 16

# Environment variable of the ranks: paths of the network namespaces of all ranks, as a JSON list.
NETWORKS = "ROPEBRIDGE_NETWORKS"

# Time limit for the relay to end, after which it is killed.
_GRACE_S = 2.0


def control_address() -> str:
    """Return the IPv4 address of the control host, the emulated host of the agent."""
    return _address(_CONTROL)


def device_address(rank: int) -> str:
    """Return the IPv4 address of a rank's emulated host."""
    return _address(_CONTROL + 1 + rank)


def _address(number: int) -> str:
    assert number < _MOST_HOSTS - 1, "a plan has fewer devices"
    return f"{_NETWORK}.{number >> 8}.{number & 0xFF}"


def missing() -> str | None:
    """Return a sentence that says what this machine lacks to run the relay; None if nothing is missing."""
    if sys.platform != "linux":
        return f"links are emulated below TCP by namespaces and TUN devices of Linux, and this is {sys.platform}"
    probe = [sys.executable, "-m", "executor.wan.linux", "probe"]
    done = subprocess.run(probe, env=python_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        return f"the check whether this machine can emulate links failed: {reason[0]}"
    return done.stdout.strip() or None


def enter_device_network() -> None:
    """Move a rank's process into the network namespace of its device; do nothing in a job without a relay.

    A rank must call this before it opens a socket, since open sockets stay in the namespace in which they were opened.
    """
    networks = os.environ.get(NETWORKS)
    if networks is not None:
        enter_network(json.loads(networks)[int(os.environ["RANK"])])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


@contextmanager
def running_relay(
    job: JobFolder, tcp: Tcp = "wide-area", failed: Callable[[str], None] = lambda reason: None
) -> Iterator[None]:
    """Run a job's relay, `executor.wan.relay`, in a process during the context.

    Ranks that this process starts in the context find their networks by an environment variable. After the context the
    relay's report is in the job's folder.

    Args:
        job: The folder of the job.
        tcp: TCP settings of the emulated hosts.
        failed: Called in another thread with the reason if the relay ends during the context.

    Raises:
        RunError: The relay did not start; its output in the job's log gives the reason.
    """
    command = [sys.executable, "-m", "executor.wan.relay", str(os.getpid()), str(job.path), tcp]
    relay = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert relay.stdout is not None
    networks = relay.stdout.readline()
    if not networks:
        status = relay.wait()
        raise RunError(f"the relay of the emulated links did not start: {job.last_printed() or f'status {status}'}")
    os.environ[NETWORKS] = networks
    is_over = threading.Event()

    def report_end() -> None:
        status = relay.wait()
        if not is_over.is_set():
            reason = f"the relay of the emulated links ended with status {status}"
            failed(job.run_failure.read_text() if job.run_failure.exists() else reason)

    threading.Thread(target=report_end, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        end(relay, _GRACE_S)
