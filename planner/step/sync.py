"""Sums of gradients as actions that take no time themselves, and the messages between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.allreduce import GradientSync
from planner.step.graph import Ints
from planner.step.tables import SYNC, Actions, Messages


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """One actor's part in one sum of gradients: consecutive actions.

    Attributes:
        sync: What is summed.
        actor: Who.
        first_action: The first of its actions.
        end_action: After the last one.
        sent_bytes: What it sends in all of them.
    """

    sync: GradientSync
    actor: int
    first_action: int
    end_action: int
    sent_bytes: int

    def moved(self, numbers: Ints) -> "SyncSpan":
        """Return the span under the new numbers of the actions."""
        first = int(numbers[self.first_action])
        return replace(self, first_action=first, end_action=first + self.end_action - self.first_action)


def sync_actions(
    syncs: Sequence[GradientSync], actors: Mapping[str, int], element_bytes: int
) -> tuple[Actions, Messages, list[SyncSpan]]:
    """Return the actions and messages of all sums, actor by actor; ``actors`` says which one sums for a device.

    An exchange hands its part over at once and then waits, so what it waits for is received by the action after it;
    an actor has one action more than exchanges.
    """
    of_device: dict[str, list[GradientSync]] = {device: [] for device in actors}
    for sync in syncs:
        for device in sync.devices:
            of_device[device].append(sync)
    acting: list[int] = []
    sent: list[tuple[int, tuple[int, int, int, int], int]] = []
    waiting: dict[tuple[int, int, int, int], int] = {}
    spans = []
    for device, actor in actors.items():
        for sync in of_device[device]:
            exchanges = sync.exchanges(device)
            first = len(acting)
            for action, exchange in enumerate(exchanges, start=first):
                if exchange.send_to is not None:
                    key = (sync.first_layer, exchange.round, actor, actors[sync.devices[exchange.send_to]])
                    sent.append((action, key, exchange.send_elements * element_bytes))
                if exchange.receive_from is not None:
                    source = actors[sync.devices[exchange.receive_from]]
                    waiting[sync.first_layer, exchange.round, source, actor] = action + 1
            acting += [actor] * (len(exchanges) + 1)
            sent_bytes = sum(exchange.send_elements for exchange in exchanges) * element_bytes
            spans.append(SyncSpan(sync, actor, first, len(acting), sent_bytes))
    return no_actions(acting), _messages(sent, waiting), spans


def no_actions(acting: list[int]) -> Actions:
    """Return an action for each of these actors that takes no time."""
    count = len(acting)
    nothing = np.full(count, -1, np.int64)
    none = np.zeros(count, np.int64)
    return Actions(
        np.array(acting, np.int64), np.full(count, SYNC, np.int8), none, nothing, nothing, none, none, np.zeros(count)
    )


def _messages(
    sent: list[tuple[int, tuple[int, int, int, int], int]], waiting: dict[tuple[int, int, int, int], int]
) -> Messages:
    sender = np.array([action for action, _, _ in sent], np.int64)
    receiver = np.array([waiting[key] for _, key, _ in sent], np.int64)
    size_bytes = np.array([size for _, _, size in sent], np.int64)
    none = np.zeros(len(sent), np.int64)
    return Messages(sender, receiver, size_bytes, none, none)
