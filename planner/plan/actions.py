"""Actions of a schedule, their notation, and torch's CSV of schedules."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from traces.common.errors import InputError


class Kind(StrEnum):
    """Kinds of computation on one microbatch in one stage; a backward is one ``B`` or is split into ``I`` and ``W``."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients in one
    BACKWARD_INPUT = "I"  # gradient with respect to the stage's input
    BACKWARD_WEIGHT = "W"  # gradient with respect to the stage's parameters


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
        InputError: The text is not a stage number, a kind (F, B, I or W) and a microbatch number.
    """
    match = _ACTION.match(text.strip())
    if match is None:
        valid = "write stage number, kind (F, B, I or W) and microbatch number: for example 2F0"
        raise InputError(f"'{text}' is not an action", valid=valid)
    return Action(int(match[1]), Kind(match[2]), int(match[3]))


def to_torch_csv(ranks: Sequence[Sequence[Action]]) -> str:
    """Return a schedule in the compute-only CSV of torch.distributed.pipelining: a row per rank, a cell per action."""
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
