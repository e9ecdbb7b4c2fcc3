"""Measured rates of a device kind: matrix products by shape, kernel launches and memory.

`planner.scenario.roofline` uses such a table in place of the kind's datasheet and of one efficiency for all shapes.
``ropebridge profile kind`` measures it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log2

from traces.common.errors import InputError

# What the devices of a tensor-parallel group divide in a matrix product.
DIVISIONS = ("rows", "inner", "outer")


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A product of a matrix, ``rows`` x ``inner``, with one of ``inner`` x ``outer``, in a layer's forward.

    The sizes are not whole numbers where a tensor-parallel group divides them unevenly.

    Attributes:
        rows: Rows for one sample, such as its tokens.
        inner: Columns of the first matrix, which are the rows of the second one.
        outer: Columns of the second matrix.
        count: Number of such products.
        divide: The size that the devices of a tensor-parallel group divide, one of `DIVISIONS`.

    Raises:
        InputError: A size is not above zero.
    """

    rows: float
    inner: float
    outer: float
    count: int = 1
    divide: str = "outer"

    def __post_init__(self) -> None:
        if not all(0 < each < float("inf") for each in (self.rows, self.inner, self.outer, self.count)):
            raise InputError(
                f"{self.count} products of {self.rows:g} x {self.inner:g} with {self.inner:g} x {self.outer:g} numbers "
                "are not possible",
                valid="give sizes above zero",
            )

    @property
    def flop(self) -> float:
        """Operations for one sample, in all ``count`` products."""
        return 2.0 * self.rows * self.inner * self.outer * self.count

    def part(self, degree: int) -> "MatrixProduct":
        """Return the product that one of ``degree`` devices computes."""
        return replace(self, **{self.divide: getattr(self, self.divide) / degree})


@dataclass(frozen=True)
class KindTable:
    """Rates of one device kind in one precision.

    Attributes:
        device: Name of the measured device, as torch gives it.
        precision: One of `planner.scenario.training.PRECISIONS`.
        rows: Numbers of rows of the measured products, rising; ``inner`` and ``outer`` are the other sizes.
        rates: FLOP/s of the products, [rows][inner][outer].
        launch_s: Seconds to launch a kernel.
        memory_bandwidth_bytes_per_s: Bytes that a copy reads and writes in a second.
        source: How the table was measured, in words.

    Raises:
        InputError: The sizes do not rise, or the rates do not match them.
    """

    kind: str
    device: str
    precision: str
    rows: tuple[int, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    rates: tuple[tuple[tuple[float, ...], ...], ...]
    launch_s: float
    memory_bandwidth_bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        for name, sizes in (("rows", self.rows), ("inner", self.inner), ("outer", self.outer)):
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise InputError(f"{list(sizes)} are no rising sizes", name, "give rising whole numbers above zero")
        shape = (len(self.rows), len(self.inner), len(self.outer))
        if len(self.rates) != shape[0] or any(
            len(matrix) != shape[1] or any(len(row) != shape[2] for row in matrix) for matrix in self.rates
        ):
            expected = " x ".join(map(str, shape))
            raise InputError("the rates do not match the sizes", "rates", f"give {expected} rates: rows, inner, outer")

    def rate(self, rows: float, inner: float, outer: float) -> float:
        """Return the FLOP/s of a product of ``rows`` x ``inner`` with ``inner`` x ``outer``, from the measured ones.

        Logarithms of rates are interpolated linearly over the logarithms of the three sizes. Outside the measured
        sizes, the rate is that of the nearest ones.
        """
        axes = [_neighbours(*each) for each in ((self.rows, rows), (self.inner, inner), (self.outer, outer))]
        logarithm = 0.0
        for (one, one_share), (two, two_share), (three, three_share) in product(*axes):
            logarithm += one_share * two_share * three_share * log2(self.rates[one][two][three])
        return float(2.0**logarithm)


def _neighbours(sizes: Sequence[int], size: float) -> tuple[tuple[int, float], ...]:
    """Return the indices of the measured sizes around ``size``, with their shares."""
    above = bisect_right(sizes, size)
    if above == 0:
        return ((0, 1.0),)
    if above == len(sizes):
        return ((len(sizes) - 1, 1.0),)
    low, high = log2(sizes[above - 1]), log2(sizes[above])
    share = (log2(size) - low) / (high - low)
    return ((above - 1, 1.0 - share), (above, share))
