"""What the actions and messages of a step are: tables with a column per field."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.step.graph import Floats, Ints

# Kinds after those of `planner.schedules.kernel.problem`: actions that exchange gradients, and the optimizer's update.
SYNC, UPDATE = 4, 5


class Actions(NamedTuple):
    """Actions, actor by actor, in the order in which each does them; all columns [actions].

    Attributes:
        actor: Index of who does it.
        kind: A number of `planner.schedules.kernel.problem`, or `SYNC` or `UPDATE`.
        pipeline: Index.
        stage: Index in the pipeline, -1 where none applies.
        microbatch: Index in the pipeline, -1 where none applies.
        first_sample: First sample of the microbatch that the actor takes.
        end_sample: After the last one.
        duration_s: Seconds, as profiled.
    """

    actor: Ints
    kind: NDArray[np.int8]
    pipeline: Ints
    stage: Ints
    microbatch: Ints
    first_sample: Ints
    end_sample: Ints
    duration_s: Floats


class Messages(NamedTuple):
    """Messages in the order of the actions that hand them over; all columns [messages].

    Attributes:
        sender: The action that hands it over.
        receiver: The action that waits for it.
        size_bytes: On the wire.
        first_sample: First sample that it carries, 0 for gradients being summed.
        end_sample: After the last one, 0 for gradients being summed.
    """

    sender: Ints
    receiver: Ints
    size_bytes: Ints
    first_sample: Ints
    end_sample: Ints

    def between(self, sender: Ints, receiver: Ints) -> "Messages":
        """Return the messages between actions that have other numbers as senders and as receivers, [actions] each."""
        return self._replace(sender=sender[self.sender], receiver=receiver[self.receiver])

    def later(self, shift: int) -> "Messages":
        """Return the messages between actions whose numbers are by so much higher."""
        return self._replace(sender=self.sender + shift, receiver=self.receiver + shift)


def join_actions(one: Actions, other: Actions) -> Actions:
    """Return both tables as one, the first before the second."""
    columns: list[Any] = list(one)
    others: list[Any] = list(other)
    joined = [np.concatenate([column, more]) for column, more in zip(columns, others, strict=True)]
    return Actions._make(joined)


def append(
    actions: Actions, messages: Messages, later: Actions, later_messages: Messages
) -> tuple[Actions, Messages, Ints]:
    """Put each actor's later actions after its own; return both tables, and the new number of each later action.

    The later messages count through all actions, the later ones after the others.
    """
    if not len(later.actor):
        return actions, messages, np.empty(0, np.int64)
    every = join_actions(actions, later)
    by_actor = np.argsort(every.actor, kind="stable")
    numbers = np.empty_like(by_actor)
    numbers[by_actor] = np.arange(len(by_actor))
    shift = len(actions.actor)
    columns = [np.concatenate(pair) for pair in zip(messages[2:], later_messages[2:], strict=True)]
    sender = numbers[np.concatenate((messages.sender, later_messages.sender))]
    receiver = numbers[np.concatenate((messages.receiver, later_messages.receiver))]
    by_sender = np.argsort(sender, kind="stable")
    return (
        Actions._make([column[by_actor] for column in every]),
        Messages._make([column[by_sender] for column in (sender, receiver, *columns)]),
        numbers[shift:],
    )
