"""The training data that a scenario names; the executor reads it, planner and simulator do not."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Types of the numbers in files of tokens.
TOKEN_TYPES = ("uint16", "uint32")


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """A folder of ``.bin`` files, each of token numbers and nothing else.

    Attributes:
        path: Folder of the files, which are read in the order of their names.
        length: Number of tokens in a sample.
        dtype: Type of a token number, one of `TOKEN_TYPES`.
    """

    path: Path
    length: int
    dtype: str = "uint16"


@dataclass(frozen=True, slots=True)
class DatasetCode:
    """The user's own data set.

    Attributes:
        path: Python file with a function ``build`` that returns a torch ``Dataset`` or ``IterableDataset``.
        arguments: Keyword arguments for ``build``.
    """

    path: Path
    arguments: Mapping[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class SavedDataset:
    """A folder that ``save_to_disk`` of Hugging Face's ``datasets`` has written.

    Attributes:
        path: Folder of the data set.
        inputs: Name of the column of the inputs.
        targets: Name of the column of the targets, which may be that of the inputs.
    """

    path: Path
    inputs: str
    targets: str


DataSource = TokenFiles | DatasetCode | SavedDataset


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training data that a scenario names.

    Attributes:
        source: What is read, which must be at the same path on every host.
        workers: Number of processes of each rank that read ahead; with 0 the rank reads when it needs the samples.
    """

    source: DataSource
    workers: int = 0
