"""Opens the data that a scenario names."""

import hashlib
from typing import Any

from torch.utils.data import IterableDataset

from executor.training.data.datasets import IndexedSamples, StreamedSamples, seed_all
from executor.training.data.order import EndlessData
from executor.training.data.tokens import TokenSamples
from planner.scenario.training import DatasetCode, DataSource, SavedDataset, TokenFiles, TrainingData
from planner.systems.user_code import load_build, user_code
from traces.common.errors import InputError

_RESULT = "a torch Dataset or IterableDataset, whose samples are pairs (input, target)"


def open_data(named: TrainingData, seed: int) -> EndlessData:
    """Return the samples of the data that a scenario names, in an order that depends on the seed only.

    Raises:
        InputError: The data is missing, or is not of the form that the scenario says.
    """
    source = named.source
    if isinstance(source, TokenFiles):
        return TokenSamples(source, seed)
    if isinstance(source, SavedDataset):
        return IndexedSamples(_SavedPairs(source), source.path, seed)
    return _user_samples(source, named.workers, seed)


def _user_samples(code: DatasetCode, workers: int, seed: int) -> EndlessData:
    unseeded = load_build(code.path, "dataset", _RESULT, code.arguments)

    def build() -> Any:
        # In each process that reads the data, and for each pass, alike.
        seed_all(seed)
        return unseeded()

    dataset = build()
    # Torch's IterableDataset also has '__getitem__', which only raises an error.
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        if workers > 1:
            raise InputError(
                f"an IterableDataset cannot be read by {workers} processes, each of which would read all of it",
                where=str(code.path),
                valid="give 'workers: 1' or 'workers: 0'",
            )
        return StreamedSamples(build, code.path, seed)
    if not hasattr(dataset, "__getitem__"):
        raise InputError(f"'build' returns a {type(dataset).__name__}", where=str(code.path), valid=f"return {_RESULT}")
    return IndexedSamples(dataset, code.path, seed)


class _SavedPairs:
    """The pairs of two columns of a saved data set of Hugging Face's ``datasets``."""

    def __init__(self, source: SavedDataset) -> None:
        where, columns = str(source.path), (source.inputs, source.targets)
        try:
            from datasets import DatasetDict, load_from_disk
        except ImportError:
            raise InputError(
                "Hugging Face's 'datasets' is not installed", where=where, valid="pip install 'ropebridge[datasets]'"
            ) from None
        if not source.path.is_dir():
            raise InputError(
                "there is no such data set",
                where=where,
                valid="correct 'huggingface' in the training's data; every host that trains needs the folder",
            )
        with user_code(source.path, "the data set cannot be opened", "name a folder written by 'save_to_disk'"):
            found = load_from_disk(where)
        if isinstance(found, DatasetDict):
            names = ", ".join(str(source.path / name) for name in found)
            raise InputError("the folder has several data sets", where=where, valid=f"name one of {names}")
        for column in columns:
            if column not in found.column_names:
                raise InputError(
                    f"the data set has no column '{column}'", where=where, valid=f"name one of {found.column_names}"
                )
        self._rows = found.with_format("torch", columns=list(dict.fromkeys(columns)))
        self._inputs, self._targets = columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._rows[index]
        return row[self._inputs], row[self._targets]


def fingerprint(source: DataSource) -> str:
    """Return a text that differs if data does: a digest of the names and sizes of files, or of a data set's code."""
    path = source.path
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.is_file())
        return _digest("".join(f"{each.name} {each.stat().st_size}\n" for each in files).encode())
    return _digest(path.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
