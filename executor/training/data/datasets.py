"""Samples of torch's data sets: those with an index, and those that can only be read in order."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.training.data.order import Samples, shuffled
from executor.training.data.states import StateFolder
from planner.systems.user_code import user_code
from traces.common.errors import InputError


class IndexedSamples:
    """Samples of a data set with ``__len__`` and ``__getitem__``, in the order of `shuffled`.

    Random numbers of torch, NumPy and Python are seeded for each sample, by the seed and the sample's position, so that
    they do not depend on who reads it.

    Args:
        place: The data set's file or folder, for error messages.
    """

    def __init__(self, dataset: Any, place: Path, seed: int) -> None:
        self._dataset, self._place, self._seed = dataset, place, seed
        self._batches = _Batches(place)
        # Index of the first sample, above 0 in parts of the data set.
        self._first = 0
        if not hasattr(dataset, "__len__"):
            raise InputError(
                "the data set has no '__len__'",
                where=str(place),
                valid="add it, or make the data set an IterableDataset, which is read in order",
            )
        with _user_code(place, "'__len__' of the data set fails"):
            self.size = len(dataset)
        if self.size < 1:
            raise InputError("the data set has no samples", where=str(place), valid="give it at least one")

    def samples(self, first: int, count: int) -> Samples:
        """Return inputs and targets of the samples at positions ``first`` to ``first + count - 1``."""
        indices = shuffled(self._seed, first, count, self.size, self._first).tolist()
        items = [self._item(first + number, index) for number, index in enumerate(indices)]
        return self._batches.stacked(items, first)

    def part(self, first: int, size: int) -> "IndexedSamples":
        """Return endless passes through samples ``first`` to ``first + size - 1`` of these only."""
        part = copy(self)
        part._first, part.size = self._first + first, size
        return part

    def _item(self, position: int, index: int) -> Any:
        seed_all(self._seed, position, *([self._first] if self._first else []))
        with _user_code(self._place, f"item {index} of the data set cannot be read"):
            return self._dataset[index]


class StreamedSamples:
    """Samples of a data set that can only be read in order: the sample at position p is the p-th item.

    When the data set ends it is read again from its start. To go back, it is built anew and read up to the position;
    if it has ``state_dict`` and ``load_state_dict``, as Hugging Face's have, from the last state before the position.

    Args:
        build: Returns the data set at its start; called for each pass, and to go back.
        place: The data set's file or folder, for error messages.

    Attributes:
        is_read_in_order: Whether samples can only be read in order, so that regions cannot divide them; always true.
    """

    is_read_in_order = True

    def __init__(self, build: Callable[[], Any], place: Path, seed: int) -> None:
        self._build, self._place, self._seed = build, place, seed
        self._batches = _Batches(place)
        self._dataset: Any = None
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._states: StateFolder | None = None

    def keep_states(self, states: StateFolder) -> None:
        """Keep the states that the data set has at some positions, to go on from them later or in another process."""
        self._states = states

    def forget_place(self) -> None:
        """Read from the start at the next call, as a process must that was forked from one that has read already."""
        self._iterator = None

    def samples(self, first: int, count: int) -> Samples:
        """Return inputs and targets of the samples at positions ``first`` to ``first + count - 1``."""
        if self._iterator is None or first < self._position:
            self._start_before(first)
        while self._position < first:
            self._next()
        return self._batches.stacked([self._next() for _ in range(count)], first)

    def _start_before(self, position: int) -> None:
        """Start at the last kept state up to a position, or else at the start."""
        found = self._states.newest(position) if self._states is not None else None
        self._open(*(found or (0, None)))

    def _open(self, position: int, state: Any) -> None:
        self._dataset, self._position = self._build(), position
        with _user_code(self._place, "the data set cannot be read"):
            seed_all(self._seed, position)
            if state is not None:
                self._dataset.load_state_dict(state)
            self._iterator = iter(self._dataset)

    def _next(self) -> Any:
        if self._states is not None and self._states.is_due(self._position) and hasattr(self._dataset, "state_dict"):
            with _user_code(self._place, "'state_dict' of the data set fails"):
                self._states.keep(self._position, self._dataset.state_dict())
        assert self._iterator is not None, "it was opened"
        with _user_code(self._place, f"item {self._position} of the data set cannot be read"):
            seed_all(self._seed, self._position)
            item = next(self._iterator, _END)
        if item is _END:
            item = self._first_of_next_pass()
        self._position += 1
        return item

    def _first_of_next_pass(self) -> Any:
        self._open(self._position, None)
        assert self._iterator is not None, "it was opened"
        with _user_code(self._place, "the first item of the data set cannot be read"):
            item = next(self._iterator, _END)
        if item is _END:
            raise InputError("the data set has no samples", where=str(self._place), valid="give it at least one")
        return item


_END = object()


def seed_all(*entropy: int) -> None:
    """Seed the random numbers of Python, NumPy and torch, by any numbers."""
    words = np.random.SeedSequence(entropy).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


def _user_code(place: Path, failure: str) -> AbstractContextManager[None]:
    return user_code(place, failure, "correct the data set")


class _Batches:
    """Makes batches of items, whose inputs and targets must have the shapes of the first item that it has seen.

    Args:
        place: The data set's file or folder, for error messages.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._shapes: tuple[list[int], ...] = ()

    def stacked(self, items: Sequence[Any], first: int) -> Samples:
        """Return the inputs and the targets of the items from position ``first`` on, each as one tensor."""
        pairs = [self._pair(item, first + number) for number, item in enumerate(items)]
        inputs, targets = (torch.stack(each) for each in zip(*pairs, strict=True))
        return inputs, targets

    def _pair(self, item: Any, position: int) -> Samples:
        try:
            inputs, targets = map(torch.as_tensor, item if isinstance(item, tuple | list) else ())
        except (TypeError, ValueError, RuntimeError):
            parts = f" of {', '.join(type(each).__name__ for each in item)}" if isinstance(item, tuple | list) else ""
            raise InputError(
                f"the sample at position {position} is a {type(item).__name__}{parts}",
                where=str(self._place),
                valid="give each sample as a pair (input, target) of tensors, arrays or numbers",
            ) from None
        shapes = (list(inputs.shape), list(targets.shape))
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise InputError(
                f"input and target of the sample at position {position} have shapes {shapes[0]} and {shapes[1]}",
                where=str(self._place),
                valid=f"others have {self._shapes[0]} and {self._shapes[1]}: give all the same, for example by padding",
            )
        return inputs, targets
