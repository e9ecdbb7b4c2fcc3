"""The parameters of all ranks in one file, as safetensors itself reads and writes them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from executor.control import results
from executor.control.results import merge_parameters
from executor.core.job import JobFolder
from planner.plan.plan import Pipeline

SHAPES = st.lists(st.integers(0, 5), max_size=3)
RANKS = st.lists(st.dictionaries(st.sampled_from(["0.weight", "0.bias", "1.ä", "10.w"]), SHAPES), max_size=4)


@given(ranks=RANKS, piece_bytes=st.integers(1, 64))
def test_each_layer_comes_from_the_highest_rank(
    ranks: list[dict[str, list[int]]], piece_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("job")
    job, expected = JobFolder(folder), {}
    for rank, shapes in enumerate(ranks):
        tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
        save_file(tensors, job.of_rank("parameters", rank), {"key": "value"})
        expected |= tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "_PIECE_BYTES", piece_bytes)
        # The last rank was lost, and has no file.
        merge_parameters(job, len(ranks) + 1, folder / "merged.safetensors")
    merged = load_file(Path(folder / "merged.safetensors"))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], value) for name, value in expected.items())


@given(
    samples=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    shape=st.lists(st.integers(0, 5), max_size=3),
    piece_bytes=st.integers(1, 16).map(lambda count: 4 * count),
)
def test_pipelines_that_train_separately_give_their_mean(
    samples: list[int], shape: list[int], piece_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("job")
    job, own, alike = JobFolder(folder), torch.randn(len(samples), *shape), torch.randn(shape)
    separate = {rank: Pipeline((), (count, rank + 1)) for rank, count in enumerate(samples)}
    for rank, values in enumerate(own):
        save_file({"0.own": values.clone(), "0.alike": alike}, job.of_rank("parameters", rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "_PIECE_BYTES", piece_bytes)
        merge_parameters(job, len(samples), folder / "merged.safetensors", separate)
    merged = load_file(folder / "merged.safetensors")
    weights = torch.tensor([each.samples for each in separate.values()], dtype=torch.float64)
    expected = torch.tensordot(weights / weights.sum(), own.double(), dims=1)
    torch.testing.assert_close(merged["0.own"].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(merged["0.alike"], alike)
