"""Carries out the exchanges of all participants over links that deliver at any time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.cost.collectives import Exchange
from planner.cost.synchronisation import all_reduce

Numbers = npt.NDArray[Any]


@dataclass
class Outcome:
    """What is left when nobody can go on.

    Attributes:
        values: Per participant, its numbers.
        unfinished: Participants that wait for ever.
        undelivered: Messages that nobody took: (round, source, target).
        sent: Elements per (source, target).
    """

    values: Numbers
    unfinished: list[int]
    undelivered: list[tuple[int, int, int]]
    sent: dict[tuple[int, int], int] = field(default_factory=dict)


def exchanges_of_all(algorithm: str, elements: int, regions: Sequence[str]) -> list[tuple[Exchange, ...]]:
    return [all_reduce(algorithm, elements, tuple(regions), position) for position in range(len(regions))]


def carry_out(lists: Sequence[Sequence[Exchange]], before: Numbers, seed: int) -> Outcome:
    """Let a random participant that can go on do so, until none can."""
    random = np.random.default_rng(seed)
    values = before.copy()
    messages: dict[tuple[int, int, int], Numbers] = {}
    sent: dict[tuple[int, int], int] = {}
    done = [0] * len(lists)
    handed_over = [0] * len(lists)

    def advance(position: int) -> bool:
        """Do one exchange or, if what it waits for is not there, only its send."""
        if done[position] == len(lists[position]):
            return False
        exchange = lists[position][done[position]]
        moved = handed_over[position] == done[position]
        if moved:
            handed_over[position] += 1
            if exchange.send_to is not None:
                key = (exchange.round, position, exchange.send_to)
                assert key not in messages, "a pair has two messages in one round"
                messages[key] = values[position, slice(*exchange.send)].copy()
                sent[key[1:]] = sent.get(key[1:], 0) + exchange.send_elements
        if exchange.receive_from is not None:
            arrived = messages.pop((exchange.round, exchange.receive_from, position), None)
            if arrived is None:
                return moved
            place = values[position, slice(*exchange.receive)]
            assert arrived.size == place.size
            place[:] = place + arrived if exchange.adds else arrived
        done[position] += 1
        return True

    while any(advance(int(position)) for position in random.permutation(len(lists))):
        pass
    unfinished = [position for position, each in enumerate(lists) if done[position] < len(each)]
    return Outcome(values, unfinished, list(messages), sent)
