"""Measures the control plane: queued jobs on emulated hosts, while server, hosts and launchers are killed at random.

Server and hosts are processes of this machine, ended by ``kill -9`` and started again, as a supervisor such as systemd
would do. Of a job whose launcher is killed, the ranks go on with another one, which the host starts. Every
job must end once, with the losses and the parameters of a run that nothing disturbs.
"""

import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.core.subprocesses import python_environment
from executor.deploy.bundle import HostedRun, RunBundle
from experiments.benches.processes import MARK, marked_processes
from experiments.benches.result import BenchResult, Row, at_least, at_most
from experiments.runs.jobs.access import TOKEN_VARIABLE, Access
from experiments.runs.jobs.attempt import MODULE
from experiments.runs.jobs.client import Client, NoAnswerError
from experiments.runs.jobs.packing import pack
from experiments.runs.jobs.states import ENDED, State
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_plan
from traces.common.atomic import scratch_folder

_JOBS, _HOSTS, _KILLS = 30, 4, 30
_QUICK_JOBS, _QUICK_HOSTS, _QUICK_KILLS = 4, 2, 6

# The victim that is one of the jobs' launchers, chosen as often as two of server and hosts.
_LAUNCHER = "launcher"

# Lengths of the jobs, in turn, and their interval of checkpoints: most kills hit a job between two checkpoints.
_STEPS = (100, 200, 300)
_CHECKPOINT_EVERY = 20

_LEASE = "5 s"
_BETWEEN_KILLS_S = (2.0, 16.0)
_AWAY_S = (0.0, 3.0)
_LIMIT_S = 1800.0
_POLL_S = 0.2


@dataclass(eq=False)
class _Fleet:
    """The processes of a server and its hosts, by name; the server's name is ``server``."""

    folder: Path
    hosts: Sequence[str]
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = int(free.getsockname()[1])
        self.client = Client(Access(f"https://127.0.0.1:{self._port}", self.token))

    def start(self, name: str) -> None:
        """Start the server or a host."""
        if name == "server":
            options = ["serve", str(self.folder / "queue"), "--listen", f"127.0.0.1:{self._port}", "--lease", _LEASE]
        else:
            shared = str(self.folder / "shared")
            options = ["jobs", "work", name, "--shared", shared, "--device", "cpu=2"]
            options += ["--server", f"https://127.0.0.1:{self._port}"]
        scratch = self.folder / "scratch"
        for each in (scratch, self.folder / "shared"):
            each.mkdir(exist_ok=True)
        environment = {**python_environment(), TOKEN_VARIABLE: self.token, MARK: self.mark, "TMPDIR": str(scratch)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "experiments", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def kill(self, name: str) -> None:
        """End the server or a host by SIGKILL, as a crash of its machine would."""
        self.processes[name].kill()
        self.processes[name].wait()

    def kill_launcher(self, chance: random.Random) -> bool:
        """End the launcher of one of the jobs by SIGKILL; return whether there was any."""
        launchers = [pid for pid, command in marked_processes(self.mark).items() if f"-m {MODULE} " in command]
        with suppress(ProcessLookupError, IndexError):
            os.kill(chance.choice(launchers), signal.SIGKILL)
            return True
        return False

    def end(self) -> None:
        """Ask all processes to end, and kill those that do not."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _running(folder: Path, hosts: Sequence[str]) -> Iterator[_Fleet]:
    fleet = _Fleet(folder, hosts)
    try:
        for name in ("server", *hosts):
            fleet.start(name)
        yield fleet
    finally:
        fleet.end()


def measure_jobs(quick: bool, tell: Callable[[str], None], seed: int | None = None) -> BenchResult:
    """Train queued jobs while server and hosts are killed; check that each ends once, as if nothing had happened.

    Args:
        quick: Whether to measure fewer jobs, hosts and kills.
        tell: Called with a line about each kill, with the seed, and when jobs have ended.
        seed: Seed of the times and the victims; None for another one each time.
    """
    jobs, hosts, kills = (_QUICK_JOBS, _QUICK_HOSTS, _QUICK_KILLS) if quick else (_JOBS, _HOSTS, _KILLS)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    tell(f"seed {seed}")
    scenario = choose_scenario("digits")
    plan = make_plan("megatron", scenario)
    with scratch_folder() as folder:
        names = [f"host-{number}" for number in range(1, hosts + 1)]
        with _running(folder, names) as fleet:
            began_s = time.monotonic()
            steps = {f"job-{number:02}": _STEPS[number % len(_STEPS)] for number in range(jobs)}
            for job, count in steps.items():
                run = HostedRun("real", count, "none", 0, "", _CHECKPOINT_EVERY)
                _patiently(partial(fleet.client.submit, job, pack(RunBundle(scenario, plan, run))))
            victims = _kill_at_random(fleet, random.Random(seed), kills, tell)
            found = _await_ends(fleet, tell)
            took_s = time.monotonic() - began_s
        left = len(marked_processes(fleet.mark))
        expected = {count: _undisturbed(scenario, plan, count, folder) for count in set(steps.values())}
        rows, checks = _compare(found, steps, expected, folder / "shared")
    row: Row = {
        "jobs": jobs,
        "hosts": hosts,
        "killed hosts": sum(victims[name] for name in names),
        "killed server": victims["server"],
        "killed launchers": victims[_LAUNCHER],
    }
    row = {**row, **rows, "seconds": took_s, "seed": seed}
    bars = [
        at_least("jobs that finished", checks["finished"], jobs),
        at_most("jobs that ended another number of times than once", checks["not once"], 0),
        at_most("steps whose loss is missing, double, or not that of an undisturbed run", checks["losses"], 0),
        at_most("jobs with other parameters than an undisturbed run", checks["parameters"], 0),
        at_most("processes left behind", left, 0),
    ]
    return BenchResult([row], bars)


def _patiently(request: Callable[[], Any]) -> Any:
    """Send a request again until the server answers."""
    until_s = time.monotonic() + _LIMIT_S
    while True:
        try:
            return request()
        except NoAnswerError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)


def _kill_at_random(fleet: _Fleet, chance: random.Random, kills: int, tell: Callable[[str], None]) -> Counter[str]:
    """Kill server, hosts and launchers at random times; return how often. The first two are started again."""
    victims: Counter[str] = Counter()
    # Until something trains, a kill would test nothing.
    while not any(job["state"] == State.RUNNING for job in _patiently(fleet.client.jobs)["jobs"]):
        time.sleep(_POLL_S)
    restarts: list[tuple[float, str]] = []
    for number in range(kills):
        until_s = time.monotonic() + chance.uniform(*_BETWEEN_KILLS_S)
        while time.monotonic() < until_s:
            for due in [each for each in restarts if each[0] <= time.monotonic()]:
                restarts.remove(due)
                fleet.start(due[1])
            time.sleep(0.02)
        alive = [name for name in ("server", *fleet.hosts) if name not in {each[1] for each in restarts}]
        victim = chance.choice([*alive, _LAUNCHER, _LAUNCHER])
        tell(f"kill {number + 1} of {kills}: {victim}")
        if victim == _LAUNCHER:
            victims[victim] += fleet.kill_launcher(chance)
            continue
        fleet.kill(victim)
        victims[victim] += 1
        restarts.append((time.monotonic() + chance.uniform(*_AWAY_S), victim))
    for _, name in restarts:
        fleet.start(name)
    return victims


def _await_ends(fleet: _Fleet, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Wait until all jobs have ended; return them with their events."""
    until_s = time.monotonic() + _LIMIT_S
    shown = -1
    while True:
        jobs = _patiently(fleet.client.jobs)["jobs"]
        ended = sum(job["state"] in ENDED for job in jobs)
        if ended != shown:
            tell(f"{ended} of {len(jobs)} jobs have ended")
            shown = ended
        if ended == len(jobs) or time.monotonic() > until_s:
            return [_patiently(partial(fleet.client.job, job["id"])) for job in jobs]
        time.sleep(1.0)


def _undisturbed(
    scenario: Scenario, plan: Plan, steps: int, folder: Path
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Return the numbers and losses of all steps, and the final parameters, of a run that nothing disturbs."""
    path = folder / f"undisturbed-{steps}.safetensors"
    record = TorchBackend("real", parameters=path).run(scenario, plan, None, steps)
    return [[step, loss] for step, loss in enumerate(record.losses)], load_file(path)


def _compare(
    found: Sequence[Mapping[str, Any]],
    steps: Mapping[str, int],
    expected: Mapping[int, tuple[list[list[float]], dict[str, torch.Tensor]]],
    shared: Path,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return counts of what has happened, and of what must not have happened."""
    wrong_losses = wrong_parameters = 0
    for job, count in steps.items():
        losses, parameters = expected[count]
        lines = [json.loads(line) for line in _lines(shared / job / "losses.jsonl")]
        wrong_losses += abs(len(lines) - len(losses)) + sum(a != b for a, b in zip(lines, losses, strict=False))
        path = shared / job / "run" / "parameters.safetensors"
        trained = load_file(path) if path.exists() else {}
        equal = trained.keys() == parameters.keys() and all(
            torch.equal(trained[name], parameters[name]) for name in parameters
        )
        wrong_parameters += not equal
    ends = [sum(event["state"] in ENDED for event in job["events"]) for job in found]
    happened = {
        "attempts": sum(job["attempt"] for job in found),
        "jobs on several hosts": sum(len({e["host"] for e in job["events"] if e["host"]}) > 1 for job in found),
    }
    checks = {
        "finished": sum(job["state"] == State.FINISHED for job in found),
        "not once": sum(count != 1 for count in ends),
        "losses": wrong_losses,
        "parameters": wrong_parameters,
    }
    return happened, checks


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    result = measure_jobs("--quick" in sys.argv, lambda line: print(line, file=sys.stderr, flush=True))
    print(result.text())
    sys.exit(not all(check.holds for check in result.checks))
