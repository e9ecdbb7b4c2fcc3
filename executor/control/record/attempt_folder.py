"""The folder of an attempt that trains."""

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from executor.control.record.attempts import (
    ABOUT,
    ABSENCES,
    BEGAN,
    DECISIONS,
    LOSSES,
    NORMS,
    PUBLISHED,
    RECORD,
    attempt_folders,
    decisions_of,
)
from executor.core.job import CheckpointConfig
from planner.adapt.gradient_noise import GradientNorms
from planner.adapt.policy import Decision
from planner.events.event import Event
from planner.files.plan import decision_json, plan_json
from planner.plan.plan import Plan
from traces.common.atomic import remove_empty, write_text_atomically
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """The folder of one attempt: what is written while it trains."""

    path: Path

    @classmethod
    def create(
        cls, checkpoints: CheckpointConfig, first_sample: int, plan: Plan, sees_arrivals: bool
    ) -> "AttemptFolder":
        """Return the folder of an attempt that begins.

        Args:
            checkpoints: The folder of the checkpoints, and the first step.
            first_sample: Samples of all steps before the first one.
            plan: The plan of the first step.
            sees_arrivals: Whether the rows of ranks tell all arrivals (`executor.core.job.RunConfig.sees_arrivals`).

        Raises:
            InputError: The folder cannot be made.
        """
        record = checkpoints.folder.resolve() / RECORD
        try:
            record.mkdir(exist_ok=True)
            number = max((int(path.name) for path in attempt_folders(checkpoints.folder)), default=-1) + 1
            found = cls(record / f"{number:04d}")
            found.path.mkdir()
            about = {
                "first_step": checkpoints.first_step,
                "first_sample": first_sample,
                "sees_arrivals": sees_arrivals,
                "plan": plan_json(plan),
            }
            write_text_atomically(found.path / ABOUT, json.dumps(about))
        except OSError as error:
            problem, advice = f"no record can be written: {error.strerror}", "choose a folder that can be written to"
            raise InputError(problem, where=str(record), valid=advice) from error
        return found

    @property
    def published(self) -> Path:
        """File of the rows that the launcher collects."""
        return self.path / PUBLISHED

    def begin(self, origin_s: float, *, replaces: bool) -> None:
        """Note the time of day at second 0, which is ``origin_s`` by this machine's monotonic clock.

        With ``replaces``, for a run from step 0, remove the folders of earlier runs.
        """
        for earlier in attempt_folders(self.path.parent.parent) if replaces else ():
            if earlier.name < self.path.name:
                shutil.rmtree(earlier, ignore_errors=True)
        (self.path / BEGAN).write_text(repr(time.time() - time.monotonic() + origin_s))

    def drop_unless_begun(self) -> None:
        """Remove the folder, and the one around it if that is empty then, unless the attempt has come to second 0."""
        if not (self.path / BEGAN).exists():
            shutil.rmtree(self.path, ignore_errors=True)
            remove_empty([self.path.parent])

    def add_loss(self, step: int, loss: float) -> None:
        """Note the loss of a step; of a step that is done again, the last one counts."""
        self._add(LOSSES, [step, loss])

    def add_norms(self, norms: GradientNorms) -> None:
        """Note the gradient norms of a step."""
        self._add(NORMS, asdict(norms))

    def add_decision(self, decision: Decision, made_s: float) -> None:
        """Note a decision, which was made at run second ``made_s``."""
        self._add(DECISIONS, {**decision_json(decision), "made_s": made_s})

    def restore_decisions(self, stop: int) -> list[tuple[Decision, float]]:
        """Return the decisions about steps before ``stop``, with the second of each, and drop all later ones."""
        kept = [(decision, made_s) for decision, made_s in decisions_of(self.path) if decision.first_step < stop]
        lines = (json.dumps({**decision_json(decision), "made_s": made_s}) for decision, made_s in kept)
        write_text_atomically(self.path / DECISIONS, "".join(f"{line}\n" for line in lines))
        return kept

    def add_absence(self, absence: Event) -> None:
        """Note an absence of a device that is over."""
        self._add(ABSENCES, [absence.device, absence.start_s, absence.end_s])

    def _add(self, name: str, value: Any) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(value) + "\n")
