"""The verbs for the queue of a server: ``ropebridge jobs submit``, ``status``, ``logs`` and ``stop``."""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executor.deploy.bundle import HostedRun, RunBundle
from experiments.runs.console import aligned
from experiments.runs.jobs.client import Client
from experiments.runs.jobs.messages import check_name
from experiments.runs.jobs.packing import check_run, pack
from experiments.runs.jobs.states import ENDED, State
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from traces.common.errors import InputError

_FOLLOW_S = 1.0

_LONGEST_NAME = 40


def submit(
    client: Client,
    scenario: Scenario,
    plan: Plan,
    run: HostedRun,
    name: str | None,
    every: int | None,
    as_json: bool,
    tell: Callable[[str], None],
) -> str:
    """Add a job to the queue of a server; return what to print.

    Args:
        client: The client of the server.
        scenario: The scenario to train.
        plan: The plan of the first step.
        run: The options of the run; its interval of checkpoints is the default.
        name: Name of the job; None for one that is made of the scenario's.
        every: Number of steps from one checkpoint to the next, if the user has given it.
        as_json: Whether to print JSON.
        tell: Called with a line if the job can write no checkpoints.

    Raises:
        InputError: The job cannot run, or the server refuses it.
        RunError: No server answers.
    """
    if run.policy != "none":
        make_policy(run.policy, scenario)
    bundle = RunBundle(scenario, plan, run)
    try:
        check_run(bundle)
    except InputError as error:
        without = replace(bundle, run=replace(run, checkpoint_every=0))
        check_run(without)
        # The default is for jobs that can write checkpoints; that the user has asked for them is another matter.
        if every is not None:
            valid = "leave it out; the job then begins anew if its host is lost"
            raise InputError(error.problem, "--checkpoint-every", valid) from None
        tell(f"this job writes no checkpoints, and begins anew if its host is lost: {error.problem}")
        bundle = without
    job = name or _new_name(scenario.name)
    found = client.submit(job, pack(bundle))
    return json.dumps(found) if as_json else f"job {job} is {found['state']}; next: ropebridge jobs status {job}"


def _new_name(scenario: str) -> str:
    small = "".join(each if each.isascii() and each.isalnum() else "-" for each in scenario.lower())
    return f"{small[:_LONGEST_NAME].strip('-') or 'job'}-{secrets.token_hex(4)}"


def status(client: Client, job: str | None, as_json: bool) -> str:
    """Return all jobs and hosts, or one job with its events, as JSON or as text."""
    if job is None:
        found = client.jobs()
        return json.dumps(found) if as_json else _describe_all(found)
    one = client.job(check_name(job, "JOB"))
    return json.dumps(one) if as_json else _describe_one(one)


def _describe_all(found: Mapping[str, Any]) -> str:
    jobs = [
        [job["id"], job["state"], job["host"], f"{job['steps_done']}/{job['steps']}", job["reason"]]
        for job in found["jobs"]
    ]
    hosts = [
        [host["name"], "" if host["is_heard"] else "silent", _devices(host["devices"]), " ".join(host["jobs"])]
        for host in found["hosts"]
    ]
    return "\n".join(
        [
            *aligned([["JOB", "STATE", "HOST", "STEPS", ""], *jobs]),
            "",
            *aligned([["HOST", "", "DEVICES", "JOBS"], *hosts]),
        ]
    )


def _describe_one(job: Mapping[str, Any]) -> str:
    rows = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at_s"])),
            event["state"],
            f"attempt {event['attempt']}" if event["attempt"] else "",
            event["host"],
            event["reason"],
        ]
        for event in job["events"]
    ]
    host = f" on {job['host']}" if job["host"] else ""
    lines = [
        f"{job['id']}: {job['state']}{host}, {job['steps_done']} of {job['steps']} steps, "
        f"needs {_devices(job['devices'])}{': ' if job['reason'] else ''}{job['reason']}",
        *aligned([["TIME", "STATE", "", "HOST", ""], *rows]),
    ]
    return "\n".join(lines)


def _devices(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in devices.items())


def logs(client: Client, job: str, attempt: int | None, lines: int, follows: bool) -> None:
    """Print what an attempt has printed: its last lines, and with ``follows`` all new ones until the job ends.

    Raises:
        InputError: There is no such job or attempt.
    """
    known = client.job(check_name(job, "JOB"))
    number = known["attempt"] if attempt is None else attempt
    if not 0 < number <= known["attempt"]:
        has = f"its attempts are 1 to {known['attempt']}" if known["attempt"] else "it has not begun"
        raise InputError(f"job '{job}' has no attempt {number}", where="--attempt", valid=has)
    text = b""
    first_byte = 0
    while piece := client.log(job, number, first_byte):
        first_byte += len(piece)
        text += piece
    _print(b"".join(text.splitlines(keepends=True)[-lines:]))
    while follows:
        # Asked for before the log, so that the last piece is not missed.
        has_ended = known["state"] in ENDED or known["attempt"] > number
        while piece := client.log(job, number, first_byte):
            first_byte += len(piece)
            _print(piece)
        if has_ended:
            return
        time.sleep(_FOLLOW_S)
        known = client.job(job)


def _print(text: bytes) -> None:
    print(text.decode(errors="replace"), end="", flush=True)


def stop(client: Client, jobs: Sequence[str], as_json: bool) -> str:
    """Ask jobs to stop; return what to print."""
    for job in jobs:
        # Before any of them is stopped, which cannot be undone.
        client.job(check_name(job, "JOB"))
    states = {job: client.stop(job) for job in jobs}
    if as_json:
        return json.dumps(states)
    return "\n".join(f"job {job} {_SAYS[State(state)]}" for job, state in states.items())


_SAYS = {
    State.STOPPING: "stops as soon as its host hears of it",
    State.STOPPED: "is stopped",
    State.FINISHED: "had finished before",
    State.FAILED: "had failed before",
}
