"""A host of the server: it renews its lease, and runs what the server assigns to it as child processes.

The server's answer to each heartbeat lists everything that the host shall run. The host starts what it lacks, ends
what is not listed, and reports each end until the server has heard it. Without an answer it changes nothing: jobs keep
training while the server is away.

All is done in one thread, since the kernel kills a child with ``PR_SET_PDEATHSIG`` when the thread that has started it
ends.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count, islice, takewhile
from pathlib import Path

from executor.control.attachment import end_orphan, is_orphaned
from executor.core.subprocesses import adopt_orphans, python_environment
from executor.core.subprocesses import end as end_process
from experiments.runs.jobs.access import TOKEN_VARIABLE
from experiments.runs.jobs.attempt import MODULE, job_of, read_ending, steps_done
from experiments.runs.jobs.client import Client, NoAnswerError, UnprovedServerError
from experiments.runs.jobs.messages import LOG_BYTES, LOG_PIECE_BYTES, Assignment, AttemptEnd, Heartbeat, Running
from experiments.runs.jobs.packing import unpack
from experiments.runs.jobs.states import Outcome
from planner.scenario.datasheet import DATASHEET, is_gpu
from traces.common.atomic import scratch_folder
from traces.common.errors import InputError, RunError

# Heartbeats in a lease: some may be lost before the lease runs out.
_HEARTBEATS_PER_LEASE = 4
_FIRST_PAUSE_S = 1.0

# How often the host looks after its processes, and how long they may take to end when they are asked to.
_POLL_S = 0.1
_GRACE_S = 10.0

_REASON_CHARACTERS = 4000

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(eq=False)
class _Attempt:
    """An attempt that this host has.

    Attributes:
        gpus: The GPUs that no other job of this host uses meanwhile, by kind.
        report: How the attempt has ended; None while it runs.
        log_bytes: How much of the log the server has.
    """

    assignment: Assignment
    folder: Path
    shared: Path
    gpus: Mapping[str, Sequence[str]] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    report: AttemptEnd | None = None
    log_bytes: int = 0

    @property
    def log(self) -> Path:
        """The file of all that the attempt prints."""
        return self.folder / "log.txt"

    @property
    def scratch(self) -> Path:
        """The folder of the attempt's temporary files."""
        return self.folder / "scratch"

    @property
    def key(self) -> tuple[str, int]:
        """The job and the attempt's number."""
        return self.assignment.job, self.assignment.attempt


class JobHost:
    """Runs the attempts of one host.

    Args:
        client: The client of the server.
        name: The host's name.
        devices: What the host offers: numbers of devices by kind. Its GPUs are numbered in this order.
        shared: The folder that all hosts share, with a folder for each job.
        folder: A folder of this host alone.
        tell: Called with a line for each attempt that begins or ends, and when the server comes and goes.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        devices: Mapping[str, int],
        shared: Path,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._client, self._name, self._tell = client, name, tell
        self._devices = dict(devices)
        self._shared, self._folder = shared, folder
        # Later processes of this host have higher numbers.
        self._incarnation = time.time_ns()
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        self._free_gpus = _numbered_gpus(devices)
        self._pause_s = _FIRST_PAUSE_S
        self._is_heard = self._was_heard = False

    def run(self) -> None:
        """Run what the server assigns, until an exception such as an interrupt ends it; end all processes then.

        Raises:
            InputError: The token is not the server's, or another process has taken this host's name.
        """
        try:
            while True:
                self._exchange()
                until_s = time.monotonic() + self._pause_s
                while time.monotonic() < until_s and not self._note_ends():
                    time.sleep(_POLL_S)
        finally:
            for attempt in self._attempts.values():
                if attempt.process is not None:
                    attempt.process.terminate()
            for attempt in self._attempts.values():
                self._end(attempt)
            self._leave()

    def _exchange(self) -> None:
        """Report ends, send logs, renew the lease, and carry out the answer."""
        try:
            self._report()
            attempts = [
                Running(*attempt.key, steps_done(attempt.shared))
                for attempt in self._attempts.values()
                if attempt.report is None
            ]
            answer = self._client.hear(self._name, Heartbeat(self._incarnation, self._devices, attempts))
            if not self._is_heard:
                self._tell(f"host {self._name}: the server has answered")
                self._is_heard = self._was_heard = True
            self._pause_s = answer.lease_s / _HEARTBEATS_PER_LEASE
            assigned = {(each.job, each.attempt): each for each in answer.attempts}
            for key in set(self._attempts) - set(assigned):
                self._drop(self._attempts[key], "it is no longer this host's")
            for key, assignment in assigned.items():
                if assignment.stops:
                    self._stop(key, assignment)
                elif key not in self._attempts:
                    self._start(assignment)
            for attempt in self._attempts.values():
                self._send_log(attempt)
        except NoAnswerError as error:
            if isinstance(error, UnprovedServerError) and not self._was_heard:
                raise InputError(str(error)) from None
            if self._is_heard:
                self._tell(f"host {self._name}: {error}; what runs goes on")
                self._is_heard = False

    def _start(self, assignment: Assignment) -> None:
        job, number = assignment.job, assignment.attempt
        attempt = _Attempt(assignment, self._folder / f"{job}-{number}", self._shared / job)
        self._attempts[attempt.key] = attempt
        attempt.gpus = self._take_gpus(assignment.devices)
        try:
            unpack(self._client.files(job), attempt.folder / "job")
            attempt.scratch.mkdir()
            self._launch(attempt)
        except NoAnswerError:
            self._forget(attempt)
            raise
        except (InputError, OSError) as error:
            self._finish(attempt, Outcome.FAILED, str(error))
            return
        self._tell(f"job {job}: attempt {number} begins on host {self._name}")

    def _launch(self, attempt: _Attempt) -> None:
        environment = {**python_environment(), "TMPDIR": str(attempt.scratch)}
        # The code of a job has no use for the token.
        environment.pop(TOKEN_VARIABLE, None)
        if gpus := [each for numbers in attempt.gpus.values() for each in numbers]:
            # Jobs that share the host must not share its GPUs.
            environment[_VISIBLE] = ",".join(gpus)
        command = [sys.executable, "-m", MODULE, str(attempt.folder), str(attempt.shared), str(os.getpid())]
        with attempt.log.open("ab") as log:
            # In a session of its own, so that Ctrl-C reaches this process alone, which then ends the others.
            attempt.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _note_ends(self) -> bool:
        """Note which processes have ended; return whether any has."""
        ended = [each for each in self._attempts.values() if each.process is not None and each.report is None]
        ended = [each for each in ended if each.process is not None and each.process.poll() is not None]
        for attempt in ended:
            job, number = attempt.key
            assert attempt.process is not None
            if attempt.process.returncode < 0 and is_orphaned(job_of(attempt.folder)):
                self._tell(
                    f"job {job}: the launcher of attempt {number} was lost; its ranks train on, with another one"
                )
                self._launch(attempt)
                continue
            end_orphan(job_of(attempt.folder), _GRACE_S)
            ending = read_ending(attempt.folder)
            self._finish(attempt, ending.outcome, ending.reason)
        return any(attempt.report is not None for attempt in ended)

    def _finish(self, attempt: _Attempt, outcome: Outcome, reason: str) -> None:
        job, number = attempt.key
        steps = steps_done(attempt.shared)
        attempt.report = AttemptEnd(number, outcome, reason[:_REASON_CHARACTERS], steps)
        self._tell(f"job {job}: attempt {number} {outcome}{': ' if reason else ''}{reason}")

    def _report(self) -> None:
        for attempt in [each for each in self._attempts.values() if each.report is not None]:
            assert attempt.report is not None
            job, number = attempt.key
            try:
                while self._send_log(attempt):
                    pass
                if not self._client.end(job, attempt.report):
                    self._tell(f"job {job}: the end of attempt {number} came too late to count")
            except InputError as error:
                self._tell(f"job {job}: the end of attempt {number} is refused: {error}")
            self._forget(attempt)

    def _send_log(self, attempt: _Attempt) -> bool:
        """Send the next piece of an attempt's log; return whether there is more."""
        try:
            with attempt.log.open("rb") as file:
                file.seek(attempt.log_bytes)
                piece = file.read(min(LOG_PIECE_BYTES, max(0, LOG_BYTES - attempt.log_bytes)))
        except OSError:
            return False
        if not piece:
            return False
        before = attempt.log_bytes
        attempt.log_bytes = self._client.add_log(*attempt.key, before, piece)
        return attempt.log_bytes > before

    def _stop(self, key: tuple[str, int], assignment: Assignment) -> None:
        """End an attempt whose job the user has stopped."""
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = _Attempt(assignment, self._folder / "none", self._shared / assignment.job)
            self._attempts[key] = attempt
        self._end(attempt)
        if attempt.report is None:
            ending = read_ending(attempt.folder)
            self._finish(attempt, ending.outcome, "" if ending.outcome is Outcome.LOST else ending.reason)
        self._report()

    def _drop(self, attempt: _Attempt, reason: str) -> None:
        job, number = attempt.key
        self._tell(f"job {job}: attempt {number} is ended: {reason}")
        self._end(attempt)
        with suppress(InputError):
            while self._send_log(attempt):
                pass
        self._forget(attempt)

    def _end(self, attempt: _Attempt) -> None:
        if attempt.process is not None and attempt.process.poll() is None:
            end_process(attempt.process, _GRACE_S)
        end_orphan(job_of(attempt.folder), _GRACE_S)

    def _forget(self, attempt: _Attempt) -> None:
        self._attempts.pop(attempt.key, None)
        for kind, numbers in attempt.gpus.items():
            self._free_gpus[kind] += numbers
        shutil.rmtree(attempt.folder, ignore_errors=True)

    def _take_gpus(self, devices: Mapping[str, int]) -> dict[str, list[str]]:
        taken = {}
        for kind, free in self._free_gpus.items():
            needed = devices.get(kind, 0)
            taken[kind], self._free_gpus[kind] = free[:needed], free[needed:]
        return taken

    def _leave(self) -> None:
        try:
            self._client.leave(self._name, self._incarnation)
        except (InputError, RunError):
            # The lease runs out by itself.
            return


def _numbered_gpus(devices: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the numbers of a host's GPUs by kind, in the order in which the kinds are offered.

    Raises:
        InputError: More GPUs are offered than `_VISIBLE` names, so that jobs would share them.
    """
    visible = os.environ.get(_VISIBLE)
    # CUDA sees none from the first negative one on.
    named = takewhile(lambda each: each[:1] not in ("", "-"), map(str.strip, (visible or "").split(",")))
    numbers = named if visible else map(str, count())
    kinds = [kind for kind in devices if kind in DATASHEET and is_gpu(kind)]
    found = {kind: list(islice(numbers, devices[kind])) for kind in kinds}
    if any(len(found[kind]) < devices[kind] for kind in kinds):
        offered = sum(devices[kind] for kind in kinds)
        valid = f"offer fewer, or let {_VISIBLE}, which is '{visible}', name as many"
        raise InputError(f"{offered} GPUs are offered", where="--device", valid=valid)
    return found


def run_host(client: Client, name: str, devices: Mapping[str, int], shared: Path, tell: Callable[[str], None]) -> None:
    """Run a host of the server until a signal ends it; see `JobHost`.

    Raises:
        InputError: The shared folder cannot be used, or the server refuses the host.
    """
    if find_spec("torch") is None:
        # Otherwise every job would fail on this host.
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    shared = shared.resolve()
    # Not made here: on a host that lacks the shared disk, jobs would begin anew in a folder of that host alone.
    if not shared.is_dir() or not os.access(shared, os.W_OK | os.X_OK):
        raise InputError(
            "there is no such folder that can be written",
            f"--shared {shared}",
            "make it on the disk that all hosts share",
        )
    adopt_orphans()
    with scratch_folder() as folder:
        JobHost(client, name, devices, shared, folder, tell).run()
