"""The samples of a step depend on the step alone."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor.training.data.order import DataOrder, permutation
from executor.training.models.loading import load_with_sizes
from planner.scenario.scenario import ModelCode
from traces.common.errors import InputError


class Numbers:
    """A data set whose samples are their own indices."""

    layers = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum()

    def select(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        assert indices.dtype == torch.int64
        return indices, -indices


class Endless:
    layers = ()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum()

    def samples(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(first, first + count)
        return row, -row


def batch(order: DataOrder, start: int, cuts: list[int]) -> list[int]:
    """The samples of a step that begins at a position, asked for in parts."""
    parts = [order.samples(start + first, end - first) for first, end in pairwise(cuts)]
    for inputs, targets in parts:
        assert torch.equal(inputs, -targets)
    return torch.cat([inputs for inputs, _ in parts]).tolist()


SEEDS = st.integers(0, 2**63 - 1)


@given(st.integers(1, 40), st.lists(st.integers(1, 50), min_size=1, max_size=6), SEEDS, st.data())
def test_every_epoch_has_every_sample_once_however_batches_change_and_are_cut(
    size: int, batches: list[int], seed: int, data: st.DataObject
) -> None:
    order = DataOrder(Numbers(size), seed)
    seen: list[int] = []
    for global_batch in batches:
        cuts = sorted(data.draw(st.sets(st.integers(1, global_batch - 1)))) if global_batch > 1 else []
        seen += batch(order, len(seen), [0, *cuts, global_batch])
    for first in range(0, len(seen), size):
        epoch = seen[first : first + size]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(size))


@given(st.integers(1, 100), st.integers(1, 20), st.integers(60, 10**9), SEEDS)
def test_a_step_can_be_had_without_those_before_it(size: int, global_batch: int, start: int, seed: int) -> None:
    permutation.cache_clear()
    alone = batch(DataOrder(Numbers(size), seed), start, [0, global_batch])
    order = DataOrder(Numbers(size), seed)
    for earlier in (3, 2, 1):
        batch(order, start - earlier * global_batch, [0, global_batch])
    assert batch(order, start, [0, global_batch]) == alone


def test_the_order_is_the_one_that_was_promised() -> None:
    # Recorded: another version of NumPy, or of this, must not shuffle the data of a run that goes on.
    assert permutation(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(7, 3, 8).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(permutation(seed, epoch, 100)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == len(orders)


@given(st.integers(0, 100), st.integers(1, 20))
def test_endless_data_goes_on_and_on(step: int, global_batch: int) -> None:
    order = DataOrder(Endless(), seed=0)
    expected = list(range(step * global_batch, (step + 1) * global_batch))
    assert batch(order, step * global_batch, [0, global_batch // 2, global_batch]) == expected


MODEL = """
import torch
class Model:
    layers = [torch.nn.Linear(2, 2)]
    def loss(self, outputs, targets):
        return outputs.sum()
MEMBERS
def build():
    return Model()
"""
SIZE = "    size = 5\n"
SELECT = "    def select(self, indices):\n        return torch.ones(len(indices), 2), indices\n"
SAMPLES = "    def samples(self, first, count):\n        return torch.ones(count, 2), torch.ones(count)\n"


def written(folder: Path, members: str) -> ModelCode:
    path = folder / "model.py"
    path.write_text(MODEL.replace("MEMBERS", members))
    return ModelCode(path, {})


@pytest.mark.parametrize("members", [SAMPLES, SIZE + SELECT], ids=["endless", "finite"])
def test_either_kind_of_data_will_do(members: str, tmp_path: Path) -> None:
    assert load_with_sizes(written(tmp_path, members), seed=0).sizes[0].output.sizes == (2,)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        pytest.param("", "has no 'samples'", id="none"),
        pytest.param(SIZE, "has no 'select'", id="size-alone"),
        pytest.param(SELECT, "has no 'size'", id="select-alone"),
        pytest.param(SIZE + SELECT + SAMPLES, "has both 'samples' and 'select'", id="both"),
        pytest.param("    size = 0\n" + SELECT, "'size' is 0", id="empty"),
        pytest.param("    size = 5.0\n" + SELECT, "'size' is 5.0", id="not-whole"),
    ],
)
def test_what_is_missing_is_said(members: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_with_sizes(written(tmp_path, members), seed=0)
    assert caught.value.valid


@pytest.mark.parametrize(
    ("members", "message"),
    [
        pytest.param(SIZE + SELECT.replace("indices), 2", "indices), missing"), "'select' fails", id="select"),
        pytest.param(SAMPLES.replace("torch.ones(count, 2)", "[1.0]"), "'samples' fails", id="no-tensor"),
    ],
)
def test_data_that_cannot_be_had_is_wrong_input(members: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_with_sizes(written(tmp_path, members), seed=0)
