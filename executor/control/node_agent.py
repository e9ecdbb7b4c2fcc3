"""Runs the ranks of one job on this machine, and writes down which failed first.

Called as ``python -m executor.control.node_agent PARENT_PID JOB_FOLDER MODULE TELEMETRY PLANS``, the last two file
descriptors of pipes to and from the launcher, in a network namespace of its own if the job's links are emulated by a
relay. A job on several machines is the `executor.control.head.Head`'s.
"""

import json
import os
import signal
import sys
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from executor.control.agent_server import AgentServer
from executor.control.coordinator import Coordinator
from executor.control.fault_injection import FaultInjector
from executor.control.head import Head
from executor.control.processes import run_ranks
from executor.core.control_store import announce_store, open_store
from executor.core.hosts import read_hosts
from executor.core.job import JobFolder, rank_devices
from executor.core.liveness import watch_ranks
from executor.core.subprocesses import die_with_parent
from executor.wan.testbed import TestBed, control_address


def main(parent: str, folder: str, module: str, telemetry: str, plans: str) -> int:
    """Run the workers of a job on this machine; return the exit status."""
    die_with_parent(int(parent))
    # Ranks are ended, and keepers hear that the job is over, also where this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    job = JobFolder(Path(folder))
    scenario, plan, orders = job.read()
    devices = rank_devices(scenario, plan, orders)
    ranks = len(devices)
    with ExitStack() as stack:
        # Closed when this process ends: from that the launcher knows that it has.
        outbound, inbound = os.fdopen(int(telemetry), "w"), os.fdopen(int(plans))
        if (hosts := read_hosts(job.hosts)) is not None:
            return Head(job, hosts, devices, outbound, inbound).run()
        host = "127.0.0.1"
        if orders.emulator == "relay":
            host = control_address()
            stack.enter_context(TestBed(job, orders.tcp))
        coordinator = None
        if orders.is_steered:
            keepers, fail = None, partial(_fail, job)
            if orders.backup_every:
                keepers = AgentServer((host, 0), ranks, FaultInjector(job, scenario, devices).away_until_s)
                keepers.let_go()
            coordinator = Coordinator((host, 0), scenario, plan, devices, orders, outbound, inbound, keepers, fail)
            announce_store(host, coordinator.port)
        if orders.backup_every:
            # It looks after its rank.
            module = "executor.control.keeper"
        else:
            watch_ranks(job, devices)
        store = open_store((host, 0))
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(store.port)}
        failed = run_ranks(job, module, range(ranks), ranks, meeting)
        if coordinator is not None and not failed:
            coordinator.finish()
    if failed:
        job.failure.write_text(json.dumps(failed))
        return 1
    return 0


def _fail(job: JobFolder, reason: str) -> None:
    """Have the launcher hear why the run cannot go on, and end."""
    job.run_failure.write_text(reason)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_status = 1
    try:
        exit_status = main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # After a failure the bridge's thread still waits for ranks that are gone.
        os._exit(exit_status)
