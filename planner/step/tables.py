"""The actions and messages of a step: tables with one array for each field."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.step.graph import Floats, Ints

# Kinds of actions beyond F, B, I and W (`planner.schedules.kernel.problem`): exchange of gradients, optimizer's update.
SYNC, UPDATE = 4, 5


class Actions(NamedTuple):
    """Actions, actor by actor, in the order in which an actor runs them; every column has shape [actions].

    Attributes:
        actor: Index of the actor.
        kind: Constant of `planner.schedules.kernel.problem` (F, B, I, W), `SYNC` or `UPDATE`.
        pipeline: Index of the pipeline.
        stage: Index of the stage in the pipeline, -1 for none.
        microbatch: Index of the microbatch in the pipeline, -1 for none.
        start_sample: First sample of the microbatch that the actor takes.
        stop_sample: Index after the last sample that the actor takes.
        duration_s: Profiled duration, seconds.
    """

    actor: Ints
    kind: NDArray[np.int8]
    pipeline: Ints
    stage: Ints
    microbatch: Ints
    start_sample: Ints
    stop_sample: Ints
    duration_s: Floats


class Messages(NamedTuple):
    """Messages in the order of the actions that send them; every column has shape [messages].

    Attributes:
        sender: Action that sends the message when it ends.
        receiver: Action that waits for the message.
        size_bytes: Bytes on the wire.
        flows: Number of equal parts in which the devices of a tensor-parallel group send the message at once.
        start_sample: First sample of the microbatch that the message carries, 0 for sums of gradients.
        stop_sample: Index after the last sample that it carries, 0 for sums of gradients.
        copy_out_s: Time for which the sender's copy engine copies it from GPU to host, seconds.
        copy_in_s: Time for which the receiver's copy engine copies it from host to GPU, seconds.
    """

    sender: Ints
    receiver: Ints
    size_bytes: Ints
    flows: Ints
    start_sample: Ints
    stop_sample: Ints
    copy_out_s: Floats
    copy_in_s: Floats

    def between(self, sender: Ints, receiver: Ints) -> "Messages":
        """Return the messages with renumbered actions: ``sender[n]`` and ``receiver[n]`` replace action n."""
        return self._replace(sender=sender[self.sender], receiver=receiver[self.receiver])

    def later(self, shift: int) -> "Messages":
        """Return the messages with ``shift`` added to all action indices."""
        return self._replace(sender=self.sender + shift, receiver=self.receiver + shift)


def join_actions(one: Actions, other: Actions) -> Actions:
    """Return the concatenation of two tables."""
    pairs: Any = zip(one, other, strict=True)
    return Actions._make(np.concatenate(pair) for pair in pairs)


def append(
    actions: Actions, messages: Messages, later: Actions, later_messages: Messages
) -> tuple[Actions, Messages, Ints]:
    """Return both tables of actions as one, with each actor's ``later`` actions after its other actions.

    ``messages`` are between ``actions`` only, ``later_messages`` between any actions; in the latter, indices of
    ``later`` actions follow the indices of ``actions``.

    Returns:
        The actions, all messages, and the new index of each action of ``later``.
    """
    if not len(later.actor):
        return actions, messages, np.empty(0, np.int64)
    joined = join_actions(actions, later)
    by_actor = np.argsort(joined.actor, kind="stable")
    numbers = np.empty_like(by_actor)
    numbers[by_actor] = np.arange(len(by_actor))
    shift = len(actions.actor)
    columns = [np.concatenate(pair) for pair in zip(messages[2:], later_messages[2:], strict=True)]
    sender = numbers[np.concatenate((messages.sender, later_messages.sender))]
    receiver = numbers[np.concatenate((messages.receiver, later_messages.receiver))]
    by_sender = np.argsort(sender, kind="stable")
    return (
        Actions._make([column[by_actor] for column in joined]),
        Messages._make([column[by_sender] for column in (sender, receiver, *columns)]),
        numbers[shift:],
    )
