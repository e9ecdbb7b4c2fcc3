"""Samples from a folder of files of token numbers, which are mapped into memory."""

import mmap
from copy import copy
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from executor.training.data.order import NO_TARGET, DivisibleData, Samples, shuffled
from planner.scenario.training import TokenFiles
from traces.common.errors import InputError


class TokenSamples:
    """Samples of consecutive tokens; the targets are the tokens that follow each of them.

    A file of T tokens has (T - 1) // N samples of N tokens: sample i has the tokens from i N on as inputs, and those
    from i N + 1 on as targets. No sample reaches into another file. The samples of all files are one data set, which is
    read in the order of `shuffled`.

    Raises:
        InputError: The folder is missing or has no file, or a file's size does not fit, or there is no whole sample.
    """

    def __init__(self, files: TokenFiles, seed: int) -> None:
        self._length, self._seed = files.length, seed
        number_bytes = np.dtype(files.dtype).itemsize
        paths = _token_files(files.path)
        sizes = [path.stat().st_size for path in paths]
        for path, size in zip(paths, sizes, strict=True):
            if size % number_bytes:
                raise InputError(
                    f"its {size} bytes are no whole number of {files.dtype} numbers",
                    where=str(path),
                    valid=f"write {number_bytes} bytes for each token and nothing else, or correct 'dtype'",
                )
        tokens = [size // number_bytes for size in sizes]
        counts = [max(0, each - 1) // files.length for each in tokens]
        # Index of the first sample, above 0 in parts of the data.
        self._first = 0
        self._ends = np.array(list(accumulate(counts)))
        self.size = int(self._ends[-1])
        if not self.size:
            raise InputError(
                f"no file has the {files.length + 1} tokens of a sample: the longest has {max(tokens)}",
                where=str(files.path),
                valid="add longer files, or make 'length' smaller; a sample is 'length' tokens and the one after them",
            )
        self._maps = [_mapped(path) if count else None for path, count in zip(paths, counts, strict=True)]
        self._tokens = [np.frombuffer(each or b"", files.dtype) for each in self._maps]

    def samples(self, first: int, count: int) -> Samples:
        """Return token numbers of ``count`` samples and, as targets, the next tokens; both int64."""
        rows = np.empty((count, self._length + 1), np.int64)
        for row, (file, start) in zip(rows, self._places(first, count), strict=True):
            row[:] = self._tokens[file][start : start + self._length + 1]
        sequences = torch.from_numpy(rows)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def part(self, first: int, size: int) -> "TokenSamples":
        """Return endless passes through samples ``first`` to ``first + size - 1`` of these only."""
        part = copy(self)
        part._first, part.size = self._first + first, size
        return part

    def expect(self, first: int, count: int) -> None:
        """Have the kernel read these samples from the disk, without waiting for them."""
        for file, start in self._places(first, count):
            mapped, number_bytes = self._maps[file], self._tokens[file].itemsize
            assert mapped is not None, "it has a sample"
            begin = start * number_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            end = (start + self._length + 1) * number_bytes
            mapped.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def _places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the file of each sample, and the index of its first token there."""
        indices: NDArray[np.int64] = shuffled(self._seed, first, count, self.size, self._first)
        files = np.searchsorted(self._ends, indices, side="right")
        before = np.where(files > 0, self._ends[files - 1], 0)
        return list(zip(files.tolist(), ((indices - before) * self._length).tolist(), strict=True))


def _token_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(
            "there is no such folder of tokens",
            where=str(folder),
            valid="correct 'tokens' in the training's data; every host that trains needs the folder",
        )
    paths = sorted(folder.glob("*.bin"))
    if not paths:
        raise InputError(
            "the folder has no file of tokens", where=str(folder), valid="its files must have names that end in .bin"
        )
    return paths


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def following(tokens: torch.Tensor) -> torch.Tensor:
    """Return the token after each one in samples of tokens, count x length; `NO_TARGET` after the last one."""
    return functional.pad(tokens[:, 1:], (0, 1), value=NO_TARGET)


class NextTokens:
    """Samples of tokens whose targets are the tokens themselves, as transformers takes them, with the following ones.

    Args:
        data: The samples, whose targets are not read.
    """

    def __init__(self, data: DivisibleData) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """Number of samples."""
        return self._data.size

    def part(self, first: int, size: int) -> "NextTokens":
        """Return endless passes through samples ``first`` to ``first + size - 1`` of these only."""
        return NextTokens(self._data.part(first, size))

    def samples(self, first: int, count: int) -> Samples:
        """Return the tokens of samples ``first`` to ``first + count - 1``, and the `following` ones."""
        tokens, _ = self._data.samples(first, count)
        return tokens, following(tokens)
