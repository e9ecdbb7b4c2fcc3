"""One attempt at a job: the process on a host that trains it, from the newest checkpoint of earlier attempts.

A job has a folder that all hosts share:

- ``lock`` is held by the attempt that trains. A host that was cut off from the server may still train while the job is
  placed elsewhere; the new attempt then waits here, until the old one is ended.
- ``checkpoints`` are those of the run.
- ``losses.jsonl`` has the loss of each step, each step once. A step is done again by a later attempt only if it is not
  in a checkpoint; its line is then replaced. Of pipelines that do not sum gradients in every step nobody hears the
  losses before the end of the run, when all lines are written.
- ``run`` is the run folder at the end, which appears complete. An attempt that finds it has nothing left to do: the
  host of an earlier attempt was lost before it could report the end.

The attempt's own folder on its host has the job's files in ``job``, those of its ranks in ``ranks``, and
``outcome.json``, by which the attempt tells its host how it has ended. If the attempt's process is killed, the
ranks go on without it, and the host starts another process for the same attempt, which follows them.
"""

import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.backend import TorchBackend
from executor.control.attachment import Attachment, Survival, attach
from executor.core.job import CheckpointConfig, JobFolder
from executor.core.subprocesses import die_with_parent
from executor.deploy.bundle import RunBundle, read_run_bundle
from experiments.runs.carry_out import carry_out_or_resume, present
from experiments.runs.console import CommandInterruptedError, raise_when_interrupted, say, tell
from experiments.runs.folder import read_record
from experiments.runs.jobs.states import Outcome
from experiments.runs.progress import run_lines
from planner.plan.plan import Plan
from planner.runs.record import Progress
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError, RopebridgeError, RunError
from traces.common.locks import lock_file

MODULE = "experiments.runs.jobs.attempt"

_LOCK, _CHECKPOINTS, _LOSSES, _RUN = "lock", "checkpoints", "losses.jsonl", "run"
_OUTCOME, _RANKS = "outcome.json", "ranks"

# At the end of the file of losses, more than two lines.
_LAST_BYTES = 200


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt has ended, with the reason if it has failed."""

    outcome: Outcome
    reason: str = ""


class LossFile:
    """The losses of a job's steps, a line for each step; see the module's description."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[int, float]:
        """Return the loss of each step up to the first one that is missing."""
        found: dict[int, float] = {}
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return {}
        for line in lines:
            try:
                step, loss = json.loads(line)
            except (ValueError, TypeError):
                # The attempt was killed while it wrote this line.
                break
            if step != len(found):
                break
            found[step] = loss
        return found

    def last(self) -> int:
        """Return the last step with a complete line, read from the end of the file; -1 if there is none."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return -1
        for line in reversed(lines):
            try:
                return int(json.loads(line)[0])
            except (ValueError, TypeError, LookupError):
                continue
        return -1

    def keep(self, steps: int) -> None:
        """Remove the lines of all but the first ``steps`` steps."""
        self._write(list(self.read().items())[:steps])

    def complete(self, losses: Sequence[float]) -> None:
        """Write the losses of a whole run, unless all are there."""
        if len(self.read()) < len(losses):
            self._write(enumerate(losses))

    def _write(self, lines: Iterable[tuple[int, float]]) -> None:
        write_text_atomically(self._path, "".join(f"{json.dumps(line)}\n" for line in lines))

    def add(self, step: int, loss: float) -> None:
        """Append the loss of a step."""
        try:
            with self._path.open("a") as file:
                file.write(f"{json.dumps([step, loss])}\n")
        except OSError as error:
            raise RunError(f"'{self._path}' cannot be written: {error.strerror}") from error


def steps_done(shared: Path) -> int:
    """Return how many steps of a job are done, by the folder that its hosts share."""
    return LossFile(shared / _LOSSES).last() + 1


def read_ending(folder: Path) -> Ending:
    """Return how the attempt in a host's folder has ended; its process must have ended."""
    try:
        data = json.loads((folder / _OUTCOME).read_text())
        return Ending(Outcome(data["outcome"]), str(data["reason"]))
    except (OSError, ValueError, KeyError):
        return Ending(Outcome.LOST, "its process was ended")


def job_of(folder: Path) -> JobFolder:
    """Return the folder of the ranks of the attempt in a host's folder; it outlives the attempt's process."""
    return JobFolder(folder / _RANKS)


def carry_out_attempt(folder: Path, shared: Path) -> None:
    """Train a job to its end, from the newest checkpoint in the shared folder if there is one.

    Args:
        folder: The attempt's own folder on this host.
        shared: The folder of the job that all hosts share.

    Raises:
        InputError: The job cannot run on this host.
        RunError: The run failed.
    """
    shared.mkdir(parents=True, exist_ok=True)
    job = job_of(folder)
    attachment = attach(job)
    if attachment is None:
        shutil.rmtree(job.path, ignore_errors=True)
        job.path.mkdir(0o700)
    with _lock(shared / _LOCK, attachment) as lock:
        losses = LossFile(shared / _LOSSES)
        if (shared / _RUN).is_dir():
            tell("an earlier attempt has finished this job")
            losses.complete(read_record(shared / _RUN).losses)
            return
        for part in shared.glob(f".{_RUN}.*.part"):
            shutil.rmtree(part, ignore_errors=True)
        bundle = read_run_bundle(folder / "job")
        if attachment is None:
            first, plan = _resume(bundle, shared, losses)
            losses.keep(first)
        else:
            _, plan, config = job.read()
            first, reached = config.first_step, job.first_unfinished()
            losses.keep(reached)
            tell(f"the launcher was lost; its ranks train on, and another one follows them from step {reached + 1} on")
        run = bundle.run
        lines, checkpoints = run_lines(tell), _checkpoints(bundle, shared, first)

        def watch(progress: Progress) -> None:
            if progress.loss is not None:
                losses.add(progress.step, progress.loss)
            lines(progress)

        def backend(place: Path | None) -> TorchBackend:
            return TorchBackend(
                run.compute,
                parameters=place / "parameters.safetensors" if place is not None else None,
                resources=place,
                backup_every=run.backup_every,
                checkpoints=checkpoints,
                on_this_device=run.on_this_device,
                allow_nan=run.allow_nan,
                survival=attachment or Survival(job.path, os.getppid(), lock),
                watch=watch,
                tell=tell,
            )

        output = shared / _RUN
        record = carry_out_or_resume(bundle.scenario, plan, run.policy, run.steps, output, backend, checkpoints, tell)
        losses.complete(record.losses)
        say(present(record, as_json=False))


def _resume(bundle: RunBundle, shared: Path, losses: LossFile) -> tuple[int, Plan]:
    """Return the first step of this attempt, and its plan."""
    folder = shared / _CHECKPOINTS
    if not bundle.run.checkpoint_every or not folder.is_dir():
        return 0, bundle.plan
    # Loads torch, which paced runs do not need.
    from executor.recovery.checkpoints import CheckpointFolder
    from executor.recovery.claim import resumption

    # Ranks write checkpoints while the launcher may not have heard of their last steps yet; without those checkpoints
    # the steps are done again, so that no loss is missing. The checkpoint after the last step leaves no step to do.
    # Where nobody hears of losses, ranks keep them beside the checkpoints.
    most = min(len(losses.read()) or bundle.run.steps, bundle.run.steps - 1)
    checkpoints = CheckpointFolder(folder)
    for step in checkpoints.steps:
        if step > most:
            checkpoints.drop(step)
    if not checkpoints.steps:
        return 0, bundle.plan
    try:
        first, plan = resumption(folder, bundle.scenario, bundle.run.steps, tell)
    except InputError as error:
        tell(f"training begins anew: {error}")
        for step in checkpoints.steps:
            checkpoints.drop(step)
        return 0, bundle.plan
    tell(f"resumed from the checkpoint of step {first}")
    return first, plan


def _checkpoints(bundle: RunBundle, shared: Path, first: int) -> CheckpointConfig | None:
    every = bundle.run.checkpoint_every
    return CheckpointConfig(shared / _CHECKPOINTS, every, first) if every else None


@contextmanager
def _lock(path: Path, attachment: Attachment | None) -> Iterator[int]:
    """Yield the descriptor of the locked file; ranks that train without a launcher have kept it locked."""
    if attachment is not None and attachment.lock is not None:
        with open(attachment.lock, "wb") as file:
            yield file.fileno()
        return
    with lock_file(path, waiting=lambda: tell("waiting for an earlier attempt to end")) as file:
        yield file.fileno()


def main(folder: str, shared: str, parent: str) -> None:
    """Carry out an attempt, and write how it has ended into its folder; it ends with ``parent``, the host's process."""
    die_with_parent(int(parent))
    raise_when_interrupted()
    try:
        carry_out_attempt(Path(folder), Path(shared))
        ending = Ending(Outcome.FINISHED)
    except CommandInterruptedError:
        sys.exit(130)
    except RopebridgeError as error:
        tell(f"ropebridge: {error}")
        for note in getattr(error, "__notes__", []):
            tell(note)
        ending = Ending(Outcome.FAILED, str(error))
    except Exception as error:
        # A defect ends the job too: the log has the traceback, and another attempt would meet it again.
        traceback.print_exc()
        ending = Ending(Outcome.FAILED, f"{type(error).__name__}: {error}")
    write_text_atomically(Path(folder) / _OUTCOME, json.dumps(asdict(ending)))


if __name__ == "__main__":
    main(*sys.argv[1:])
