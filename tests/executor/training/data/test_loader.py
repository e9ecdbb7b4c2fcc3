"""Loading ahead decides when samples are there, never which."""

import multiprocessing
import time
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.training.data.datasets import IndexedSamples, StreamedSamples
from executor.training.data.loader import BatchPart, SampleLoader
from executor.training.data.order import Batch, DataOrder, SampleData
from tests.executor.training.data.test_sources import HERE, Countdown, Squares
from traces.common.errors import InputError, RunError

# Steps: where each begins anew, the cuts of its batch, which may be larger than its parts, and the parts that the rank
# needs, in the order of its actions.
STEPS = st.lists(
    st.tuples(
        st.sampled_from([None, None, None, 0, 3, 7]),
        st.lists(st.integers(1, 5), min_size=1, max_size=5),
        st.randoms(use_true_random=False),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)

SOURCES = {
    "indexed": lambda: IndexedSamples(Squares(), HERE, seed=5),
    "streamed": lambda: StreamedSamples(lambda: Countdown(31, False), HERE, seed=5),
}


def follow(loader: SampleLoader, data: SampleData, steps: list) -> None:
    """Do the steps as a rank would, and compare what it gets with the order of the data."""
    order = DataOrder(data, seed=5)
    first = last_size = 0
    for restart, sizes, chance, is_unfinished in steps:
        cuts = [0, *accumulate(sizes)]
        size = cuts[-1] + chance.randint(0, 3)
        first = first + last_size if restart is None else 12 * restart
        last_size = size
        parts = [BatchPart(a, b - a, chance.random() < 0.7, chance.random() < 0.7) for a, b in pairwise(cuts)]
        loader.start_step(Batch(first, size), parts)
        asked = [(part, name) for part in parts for name in ("inputs", "targets") if getattr(part, name)]
        chance.shuffle(asked)
        for part, name in asked[: len(asked) // 2] if is_unfinished else asked:
            expected = order.samples(first + part.start, part.count)[name == "targets"]
            assert torch.equal(getattr(loader, name)(part.start, part.count), expected)


@given(st.sampled_from(sorted(SOURCES)), STEPS)
def test_every_request_gets_the_samples_of_its_step(source: str, steps: list) -> None:
    follow(SampleLoader(SOURCES[source](), 5), SOURCES[source](), steps)


@pytest.mark.parametrize(("source", "workers"), [("indexed", 1), ("indexed", 3), ("streamed", 1)])
def test_so_it_does_from_processes(source: str, workers: int) -> None:
    loader = SampleLoader(SOURCES[source](), 5, workers)

    @settings(max_examples=15)
    @given(STEPS)
    def check(steps: list) -> None:
        follow(loader, SOURCES[source](), steps)

    check()
    loader.close()


class Failing(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            raise ValueError("no such picture")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_comes_where_its_sample_is_needed(workers: int) -> None:
    loader = SampleLoader(IndexedSamples(Failing(), Path("pictures.py"), seed=5), 5, workers)
    failed = []
    for step in range(11):
        loader.start_step(Batch(step, 1), [BatchPart(0, 1, True, True)])
        try:
            loader.inputs(0, 1)
        except InputError as error:
            failed.append(str(error))
    loader.close()
    (message,) = failed
    assert message == (
        "pictures.py: item 7 of the data set cannot be read: ValueError: no such picture; correct the data set"
    )


def test_a_process_that_is_killed_is_an_error_where_its_samples_are_needed_and_nowhere_else() -> None:
    loader = SampleLoader(IndexedSamples(Squares(), HERE, seed=5), 5, workers=1)
    loader.start_step(Batch(0, 1), [BatchPart(0, 1, True, True)])
    loader.inputs(0, 1)
    (process,) = multiprocessing.active_children()
    process.kill()
    for _ in range(20):
        time.sleep(0.01)
    with pytest.raises(RunError, match="a process that loads data has ended: DataLoader worker"):
        _take_steps(loader, 100)
    loader.close()


def _take_steps(loader: SampleLoader, end: int) -> None:
    for step in range(1, end):
        loader.start_step(Batch(step, 1), [BatchPart(0, 1, True, True)])
        loader.inputs(0, 1)
