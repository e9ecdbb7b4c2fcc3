"""Which message is which: a tag is unique between its two devices among all that can be under way."""

from collections.abc import Mapping

from executor.core.step_program import Transfer
from planner.plan.actions import Kind

# Neighbouring ranks are at most a step apart and post a step ahead; four keep the tags of different steps apart.
_STEPS_APART = 4
_MESSAGES_PER_STEP = 1 << 26
_TRANSFERS: Mapping[Kind, int] = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}
_SYNC, _NORM, _UPDATE, _MOVE, _BACKUP = 2, 3, 4, 5, 6
_CODES = 7

# Of no message: who waits for it waits in vain.
NO_MESSAGE = 2**31 - 1

# Microbatches of one stage; a pair of devices may exchange for several stages.
_MOST_MICROBATCHES = 1 << 16
# A ring of n devices takes 2(n - 1) rounds.
_MOST_ROUNDS = 1 << 12


def transfer_tag(step: int, transfer: Transfer) -> int:
    """Return the tag of a transfer between two stages."""
    assert transfer.microbatch < _MOST_MICROBATCHES
    return _tag(step, _TRANSFERS[transfer.kind], transfer.stage * _MOST_MICROBATCHES + transfer.microbatch)


def sync_tag(step: int, first_layer: int, number: int) -> int:
    """Return the tag of round ``number`` of the sum of the gradients from ``first_layer`` on."""
    assert number < _MOST_ROUNDS
    return _tag(step, _SYNC, first_layer * _MOST_ROUNDS + number)


def norm_tag(step: int) -> int:
    """Return the tag of a part, or of the whole, of the gradients' norm."""
    return _tag(step, _NORM, 0)


def update_tag(step: int, first_layer: int) -> int:
    """Return the tag of an update that a pipeline sends another, of the layers from ``first_layer`` on."""
    return _tag(step, _UPDATE, first_layer)


def move_tag(step: int, number: int) -> int:
    """Return the tag of a move of layers before ``step``, by its number in the migration."""
    return _tag(step, _MOVE, number)


def backup_tag(step: int, number: int) -> int:
    """Return the tag of a copy of layers as they are before ``step``, by its number among the moves of backups."""
    return _tag(step, _BACKUP, number)


def _tag(step: int, code: int, index: int) -> int:
    assert index < _MESSAGES_PER_STEP
    return ((step % _STEPS_APART) * _CODES + code) * _MESSAGES_PER_STEP + index
