"""Arrow arrays of a log's columns, made of NumPy's buffers, and back.

pyarrow's own conversions do the same, but the first one loads pandas, and a cast loads `pyarrow.compute`: together some
0.4 s of processor time, and most commands need neither for anything else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_TYPES: Mapping[pa.DataType, Any] = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}


def number_array(values: NDArray[Any] | Sequence[float], kind: pa.DataType) -> pa.Array:
    """Return the numbers as an array of one of the types of `_TYPES`.

    Raises:
        OverflowError: A number does not fit the type.
    """
    numbers = np.ascontiguousarray(values, dtype=_TYPES[kind])
    if isinstance(values, np.ndarray) and values.dtype != numbers.dtype and not np.array_equal(values, numbers):
        raise OverflowError(f"numbers from {values.min()} to {values.max()} do not fit {kind}")
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def text_array(texts: Sequence[str], rows: Sequence[int] | None = None) -> pa.Array:
    """Return an array of strings: the text of each of ``rows``, which index ``texts``; None for all texts."""
    encoded = [text.encode() for text in texts]
    chosen = encoded if rows is None else [encoded[row] for row in rows]
    ends = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum([len(each) for each in chosen], out=ends[1:])
    return pa.StringArray.from_buffers(len(chosen), pa.py_buffer(ends), pa.py_buffer(b"".join(chosen)))


def numbers_of(array: pa.Array) -> NDArray[Any]:
    """Return the numbers of an array without nulls; they may not be written to."""
    kind = np.dtype(_TYPES[array.type])
    if not len(array):
        return np.empty(0, kind)
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize)
