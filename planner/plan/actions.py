"""Actions of a schedule, their notation, and torch's CSV of schedules."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from traces.common.errors import InputError


class Kind(StrEnum):
    """Kinds of computation on one microbatch in one stage: forward, whole backward, or its two halves."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a schedule, written ``2F0``: stage 2, forward, microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)\Z")


def parse_action(text: str) -> Action:
    """Return the action that ``text`` denotes, such as ``2F0``.

    Raises:
        InputError: The text is not a stage, a kind and a microbatch.
    """
    match = _ACTION.match(text.strip())
    if match is None:
        raise InputError(f"'{text}' is not an action", valid="write stage, F, B, I or W, microbatch: for example 2F0")
    return Action(int(match[1]), Kind(match[2]), int(match[3]))


def to_torch_csv(ranks: Sequence[Sequence[Action]]) -> str:
    """Return a schedule as torch.distributed.pipelining's compute-only CSV: a row per rank, a cell per action."""
    return "".join(",".join(str(action) for action in actions) + "\n" for actions in ranks)


def from_torch_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return the schedule in torch's compute-only CSV; empty cells (idle slots) are skipped."""
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rows.append(tuple(parse_action(cell) for cell in line.split(",") if cell.strip()))
        except InputError as error:
            raise error.within(f"line {number}") from None
    return tuple(rows)
