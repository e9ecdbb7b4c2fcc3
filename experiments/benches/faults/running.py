"""Starts a training by the command, on one host or on several, strikes it, and waits for its end."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from executor.core.subprocesses import python_environment
from executor.deploy.bundle import HostedRun
from executor.deploy.deployment import Bundle
from executor.deploy.hosts_file import hosts_of, read_hosts_file
from executor.wan.testbed import INTERFACE, device_address
from experiments.benches.faults.case import CHECKPOINT_EVERY, Case
from experiments.benches.faults.hosts import EmulatedHosts
from experiments.benches.faults.moves import policy_file
from experiments.benches.faults.trials import AGENT, CUT, FULL_DISK, KILL, LAUNCHER, STOP, Strike
from experiments.benches.processes import MARK, await_end, fill_disk, make_room, parts_of_run
from planner.files.plan import write_plan

_POLL_S = 0.02
_CHECKPOINTS = "checkpoints"

# Longest time for which hosts outlive the head.
_HOST_EXIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command has ended.

    Attributes:
        status: Exit status of the launcher; minus the number of the signal that ended it.
        said: Standard error of the launcher.
        took_s: Seconds from the launch to the end.
        struck: The strikes that have found their target.
        left: What has outlived the command: processes, and files in its temporary folder.
        is_late: Whether the launcher was ended because it did not end by itself.
    """

    status: int
    said: str
    took_s: float
    struck: tuple[Strike, ...]
    left: tuple[str, ...]
    is_late: bool


class _Command:
    """A command of ropebridge under way, whose words are read as they come."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as words:
            self.said = words.read()

    def end(self, limit_s: float) -> bool:
        """Wait for the end of the process, which is killed after ``limit_s``; return whether that was needed."""
        try:
            self.process.wait(limit_s)
            late = False
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            late = True
        # A process that has inherited the pipe, and outlives the command, holds it open.
        self._reader.join(1.0)
        return late


class Running:
    """A training in a folder of its own, started as often as needed; a context manager, which leaves nothing behind.

    Args:
        case: The training to strike.
        folder: An empty folder.
        cuts: Start and end of times in which no link carries anything: in run seconds on one host, in seconds from the
            first launch on several.

    Attributes:
        mark: The mark that all processes of the training inherit.
        scratch: The folder for temporary files of the training.
    """

    def __init__(self, case: Case, folder: Path, cuts: Sequence[tuple[float, float]] = ()) -> None:
        self._case = case
        self._folder = folder
        self._cuts = cuts
        self.mark = uuid.uuid4().hex
        self.scratch = folder / "scratch"
        self._stack = ExitStack()
        self._hosts: EmulatedHosts | None = None
        self._commands: dict[str, _Command] = {}

    def __enter__(self) -> Self:
        self.scratch.mkdir()
        case, folder = self._case, self._folder
        policy = case.policy
        if policy == "moves":
            policy = str(folder / "moves.py")
            Path(policy).write_text(policy_file(case.moves, self.log))
        scenario = case.write_scenario(folder / "faults.yaml", () if case.hosts else self._cuts)
        write_plan(case.plan, folder / "plan.json")
        if case.hosts:
            self._deploy(scenario, policy)
            self._hosts = self._stack.enter_context(EmulatedHosts(case.hosts, folder / "network", self._cuts))
        self._policy = policy
        return self

    def __exit__(self, *_: object) -> None:
        for command in self._commands.values():
            command.process.kill()
            command.end(1.0)
        await_end(self.mark)
        self._stack.close()

    @property
    def log(self) -> Path:
        """The file of the plans of all finished steps; see `MovingPolicy`."""
        return self._folder / "plans.jsonl"

    @property
    def output(self) -> Path:
        """The folder of the run."""
        return self._folder / self._case.hosts[0] / "job" / "run" if self._case.hosts else self._folder / "run"

    def forget_checkpoints(self) -> None:
        """Remove the checkpoints, so that the training can begin anew."""
        shutil.rmtree(self._folder / _CHECKPOINTS, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    def interrupt(self) -> None:
        """Have the training end, as Ctrl-C does."""
        for command in self._commands.values():
            command.process.send_signal(signal.SIGINT)

    def carry_out(self, strikes: Sequence[Strike], whole_s: float, limit_s: float, *, resumes: bool = False) -> Ended:
        """Run the training to its end, however that comes about.

        Args:
            strikes: What to do to which process, with instants as shares of ``whole_s``.
            whole_s: Seconds from the launch to the end of an undisturbed run.
            limit_s: Seconds after which the run is ended.
            resumes: Whether to go on from the newest checkpoint.
        """
        due = [(strike.at * whole_s, strike) for strike in strikes if strike.kind != CUT]
        waking: list[tuple[float, int]] = []
        returning: list[tuple[float, str]] = []
        struck = [strike for strike in strikes if strike.kind == CUT]
        start_s = time.monotonic()
        if self._hosts is not None and not resumes:
            self._hosts.begin()
        names = self._case.hosts or (LAUNCHER,)
        # Hosts that wait for their head to come back found the disk full.
        make_room(self.mark)
        for name in names:
            if name not in self._commands or self._commands[name].process.poll() is not None:
                self._start(name, resumes=resumes)
        head = self._commands[names[0]]
        while head.process.poll() is None and (now_s := time.monotonic() - start_s) < limit_s:
            for at_s, strike in [each for each in due if each[0] <= now_s]:
                target = self._strike(strike)
                if target is not None:
                    due.remove((at_s, strike))
                    struck.append(strike)
                    if strike.kind == STOP:
                        waking.append((now_s + strike.lasts_s, target))
                    elif strike.target in names[1:]:
                        returning.append((now_s + strike.lasts_s, strike.target))
            for again in [each for each in waking if each[0] <= now_s]:
                waking.remove(again)
                with suppress(OSError):
                    os.kill(again[1], signal.SIGCONT)
            for back in [each for each in returning if each[0] <= now_s]:
                returning.remove(back)
                self._commands[back[1]].end(1.0)
                self._start(back[1], resumes=False)
            time.sleep(_POLL_S)
        late = head.end(0.0 if head.process.poll() is None else 1.0)
        took_s = time.monotonic() - start_s
        for _, process in waking:
            with suppress(OSError):
                os.kill(process, signal.SIGCONT)
        status = head.process.returncode
        # Hosts wait for a head that was killed, or could not tell them that it has ended, to come back.
        left = self._await_others(names[1:]) if status == 0 or not names[1:] else []
        return Ended(status, head.said, took_s, tuple(struck), tuple(left), late)

    def _await_others(self, names: Sequence[str]) -> list[str]:
        late = [f"host {name}" for name in names if self._commands[name].end(_HOST_EXIT_S)]
        left = await_end(self.mark)
        files = [path.name for path in self.scratch.iterdir()]
        return [*late, *left, *files]

    def _strike(self, strike: Strike) -> int | None:
        """Carry out a strike; return the process that it has hit, None if that is not there yet."""
        if strike.kind == FULL_DISK:
            fill_disk(self.mark)
            return 0
        target = self._process_of(strike.target)
        if target is None:
            return None
        try:
            os.kill(target, signal.SIGKILL if strike.kind == KILL else signal.SIGSTOP)
        except ProcessLookupError:
            return None
        return target

    def _process_of(self, target: str) -> int | None:
        names = self._case.hosts or (LAUNCHER,)
        if target == LAUNCHER or target in names:
            process = self._commands[names[0] if target == LAUNCHER else target].process
            return process.pid if process.poll() is None else None
        return parts_of_run(self.mark).get(AGENT if target == AGENT else target)

    def _start(self, name: str, *, resumes: bool) -> None:
        ropebridge = [sys.executable, "-m", "experiments"]
        environment = {**python_environment(), MARK: self.mark, "TMPDIR": str(self.scratch)}
        if self._hosts is None:
            self._commands[name] = _Command([*ropebridge, *self._words(resumes)], self._folder, environment)
            return
        words = ["host", "job", name, *(["--resume"] if resumes and name == self._case.hosts[0] else [])]
        command = self._hosts.within(name, [*ropebridge, *words])
        self._commands[name] = _Command(command, self._folder / name, environment)

    def _words(self, resumes: bool) -> list[str]:
        options: dict[str, Any] = {
            "policy": self._policy,
            "emulator": self._case.where,
            "backup-every": 1,
            "checkpoint": _CHECKPOINTS,
            "checkpoint-every": CHECKPOINT_EVERY,
            "steps": self._case.steps,
            "output": "run",
        }
        plan = ["--resume"] if resumes else ["--plan", "plan.json"]
        return ["run", "faults.yaml", "--on-this-device", *plan, *(f"--{key}={each}" for key, each in options.items())]

    def _deploy(self, scenario: Any, policy: str) -> None:
        """Write the job, and give each host a copy."""
        entry = {"interface": INTERFACE}
        described: dict[str, Any] = {name: dict(entry) for name in self._case.hosts}
        described[self._case.hosts[0]]["address"] = device_address(0)
        hosts = self._folder / "hosts.yaml"
        hosts.write_text(yaml.safe_dump({"hosts": described, "arrival": "60 s"}, sort_keys=False))
        folder = str((self._folder / _CHECKPOINTS).resolve())
        run = HostedRun("real", self._case.steps, policy, 1, folder, CHECKPOINT_EVERY, on_this_device=True)
        devices = run.devices(scenario, self._case.plan, adapts=policy != "none")
        parts = hosts_of(read_hosts_file(hosts), scenario.cluster, devices, str(hosts))
        # One key for all hosts.
        Bundle(scenario, self._case.plan, run, parts).write(self._folder / "job")
        for name in self._case.hosts:
            shutil.copytree(self._folder / "job", self._folder / name / "job")
