"""Samples of the data that a scenario names: the same for every way of asking, and what the files hold."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.training.data.datasets import IndexedSamples, StreamedSamples
from executor.training.data.order import NO_TARGET, DataOrder, Samples, permutation
from executor.training.data.sources import open_data
from executor.training.data.states import StateFolder
from executor.training.data.tokens import NextTokens, TokenSamples
from planner.scenario.training import DatasetCode, SavedDataset, TokenFiles, TrainingData
from tests.helpers.processes.token_files import write_tokens

HERE = Path("dataset.py")


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(["uint16", "uint32"]),
    st.integers(0, 2**63 - 1),
    st.integers(0, 200),
    st.integers(1, 40),
)
def test_tokens_are_windows_of_the_files_in_the_order_of_an_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    length: int,
    dtype: str,
    seed: int,
    first: int,
    count: int,
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    files = [[1000 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    windows = [
        file[start : start + length + 1]
        for file in files
        for start in range(0, len(file), length)
        if start + length < len(file)
    ]
    if not windows:
        return
    data = TokenSamples(TokenFiles(write_tokens(folder, files, dtype), length, dtype), seed)
    data.expect(first, count)
    inputs, targets = data.samples(first, count)
    assert inputs.dtype == targets.dtype == torch.int64
    for position, row, following in zip(range(first, first + count), inputs, targets, strict=True):
        epoch, place = divmod(position, len(windows))
        expected = windows[permutation(seed, epoch, len(windows))[place]]
        assert row.tolist() == expected[:-1]
        assert following.tolist() == expected[1:]


class Squares:
    """A map-style data set with a random part."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index**2 + float(torch.rand(())), np.random.rand()], dtype=torch.float64), index


class Countdown(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items that can only be read in order, with a state; counts how many were read."""

    reads = 0

    def __init__(self, size: int, has_state: bool) -> None:
        self.size, self.next = size, 0
        if has_state:
            self.state_dict = lambda: {"next": self.next}
            self.load_state_dict = lambda state: setattr(self, "next", state["next"])

    def __iter__(self):  # type: ignore[no-untyped-def]
        while self.next < self.size:
            self.next += 1
            Countdown.reads += 1
            yield torch.tensor([self.next - 1, torch.randint(1000, ())]), torch.tensor(self.size - self.next)


REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15)), min_size=1, max_size=8)


@given(REQUESTS)
def test_samples_of_a_data_set_do_not_depend_on_how_they_are_asked_for(requests: list[tuple[int, int]]) -> None:
    whole, targets = IndexedSamples(Squares(), HERE, seed=5).samples(0, 80)
    data = IndexedSamples(Squares(), HERE, seed=5)
    for first, count in requests:
        found = data.samples(first, count)
        assert torch.equal(found[0], whole[first : first + count])
        assert torch.equal(found[1], targets[first : first + count])
    for epoch in range(7):
        assert targets[11 * epoch : 11 * (epoch + 1)].tolist() == permutation(5, epoch, 11).tolist()


@given(st.integers(1, 25), st.booleans(), st.integers(1, 20), REQUESTS)
def test_a_stream_gives_the_items_in_order_to_any_request(
    tmp_path_factory: pytest.TempPathFactory, size: int, has_state: bool, interval: int, requests: list[tuple[int, int]]
) -> None:
    whole, targets = StreamedSamples(lambda: Countdown(size, False), HERE, seed=1).samples(0, 80)
    assert whole[:, 0].tolist() == [position % size for position in range(80)]
    data = StreamedSamples(lambda: Countdown(size, has_state), HERE, seed=1)
    folder = tmp_path_factory.mktemp("states")
    data.keep_states(StateFolder(folder, interval))
    for first, count in requests:
        found = data.samples(first, count)
        assert torch.equal(found[0], whole[first : first + count])
        assert torch.equal(found[1], targets[first : first + count])
    # So does a process that goes on from the states of another one.
    other = StreamedSamples(lambda: Countdown(size, has_state), HERE, seed=1)
    other.keep_states(StateFolder(folder, interval))
    assert torch.equal(other.samples(requests[0][0], 1)[0], whole[requests[0][0] : requests[0][0] + 1])


@pytest.mark.parametrize(("has_state", "most"), [(True, 10 + 1), (False, 1005 + 1)])
def test_a_stream_goes_on_from_its_state_or_else_skips(has_state: bool, most: int, tmp_path: Path) -> None:
    for first, last in pairwise((0, 500, 1005)):
        data = StreamedSamples(lambda: Countdown(2000, has_state), HERE, seed=1)
        data.keep_states(StateFolder(tmp_path, 10))
        data.samples(first, last - first)
    (tmp_path / f"position-{1000:012}.pt").write_bytes(b"damaged")
    data = StreamedSamples(lambda: Countdown(2000, has_state), HERE, seed=1)
    data.keep_states(StateFolder(tmp_path, 10))
    Countdown.reads = 0
    assert data.samples(1003, 1)[0][0, 0] == 1003
    assert Countdown.reads <= most + 10
    assert Countdown.reads >= 4
    assert len(list(tmp_path.iterdir())) <= 7


DATASET = """
import torch


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index


def build(*, kind="map"):
    return {"map": Items(), "stream": torch.utils.data.ChainDataset([Stream()])}[kind]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(1), 1), (torch.zeros(1), 0)])
"""


def test_code_gives_either_kind_of_data_set(tmp_path: Path) -> None:
    path = tmp_path / "dataset.py"
    path.write_text(DATASET)
    indexed = open_data(TrainingData(DatasetCode(path, {}), 1), seed=0)
    inputs, targets = indexed.samples(0, 4)
    assert inputs.tolist() == [[each, each] for each in targets.tolist()]
    assert sorted(targets.tolist()) == [0, 1, 2, 3]
    streamed = open_data(TrainingData(DatasetCode(path, {"kind": "stream"}), 1), seed=0)
    assert streamed.samples(0, 5)[1].tolist() == [1, 0, 1, 0, 1]


def test_a_saved_data_set_gives_two_of_its_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[n, n + 1] for n in range(5)], "labels": list(range(5)), "other": list("abcde")}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    data = open_data(TrainingData(SavedDataset(tmp_path / "saved", "input_ids", "labels"), 1), seed=0)
    inputs, targets = data.samples(0, 5)
    assert inputs.tolist() == [[each, each + 1] for each in targets.tolist()]
    same = open_data(TrainingData(SavedDataset(tmp_path / "saved", "input_ids", "input_ids"), 1), seed=0)
    assert torch.equal(*same.samples(0, 5))


def test_tokens_that_are_their_own_targets_become_the_following_ones() -> None:
    class Tokens:
        def samples(self, first: int, count: int) -> Samples:
            tokens = torch.arange(first, first + 3 * count).view(count, 3)
            return tokens, tokens

    inputs, targets = NextTokens(Tokens()).samples(4, 2)
    assert inputs.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert targets.tolist() == [[5, 6, NO_TARGET], [8, 9, NO_TARGET]]


SHUFFLED = """
import random
import numpy as np
import torch

class Pairs(torch.utils.data.{kind}):
    def __init__(self):
        self.order = list(range(40))
        random.shuffle(self.order)
        self.order = [self.order[place] for place in np.random.permutation(40)]
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.tensor([float(self.order[index])]), self.order[index]
    def __iter__(self):
        return (self[index] for index in range(40))

def build():
    return Pairs()
"""


@pytest.mark.parametrize("kind", ["Dataset", "IterableDataset"])
def test_a_data_set_that_shuffles_itself_is_the_same_in_every_process_and_pass(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.py"
    path.write_text(SHUFFLED.format(kind=kind))
    drawn = []
    for chance in (1, 2):
        random.seed(chance)
        np.random.seed(chance)
        data = open_data(TrainingData(DatasetCode(path, {})), seed=5)
        order = DataOrder(data, seed=5)
        drawn += [order.samples(0, 8)[1].tolist(), order.samples(8, 8)[1].tolist(), order.samples(0, 8)[1].tolist()]
    assert drawn[0] == drawn[2] == drawn[3] == drawn[5]
    assert drawn[1] == drawn[4]
