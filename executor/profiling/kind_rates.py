"""Measures a device: rates of matrix products by shape, the launch time of a kernel, and the memory's bandwidth."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

import torch

from executor.training.device import synchronize
from executor.training.models.precision import boundary_dtype, use_tensor_cores

# Sizes of the products, of which `grid_for` chooses as many as the time allows. Small ones are also those of tensor-
# parallel groups, whose devices have a part of a matrix each.
_ROWS = (1, 16, 64, 256, 1024, 4096, 16384)
_WIDTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# Each product is computed at least this often, after a first time that is not counted, and for about this time.
_REPEATS = 3
_LEAST_S = 0.05

# The product by which the device's speed is estimated before the grid is chosen, and the share of the time that the
# grid may take at this speed: narrow products are slower.
_PROBE = 512
_PLANNED_SHARE = 0.4

_LAUNCHES = 1000
_ROUNDS = 7

# Bytes of the copied tensor: much more than a cache holds.
_COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of measured products: every number of rows with every inner and every outer width."""

    rows: Sequence[int]
    widths: Sequence[int]

    def planned_s(self, flop_per_s: float) -> float:
        """Return about how long the measurement takes at a rate."""
        return sum(
            max(_LEAST_S, (1 + _REPEATS) * 2 * rows * inner * outer / flop_per_s)
            for rows in self.rows
            for inner in self.widths
            for outer in self.widths
        )


@dataclass(frozen=True, slots=True)
class KindRates:
    """What was measured of a device.

    Attributes:
        rates: FLOP/s of the products, [rows][inner][outer].
        launch_s: Mean time to launch one of many small kernels, seconds.
        memory_bandwidth_bytes_per_s: Bytes that a copy reads and writes in a second.
    """

    grid: Grid
    rates: Sequence[Sequence[Sequence[float]]]
    launch_s: float
    memory_bandwidth_bytes_per_s: float


def measuring_steps() -> int:
    """Return how many times `measure_kind` reports its progress at most."""
    return 1 + len(_ROWS)


def measure_kind(
    precision: str, device: torch.device, limit_s: float, begin: Callable[[str], None] = lambda _: None
) -> KindRates:
    """Measure a device in about ``limit_s`` seconds or less.

    Args:
        precision: A precision that layers can be trained in.
        device: The device to measure.
        limit_s: Time for all products. With less time fewer sizes are measured.
        begin: Called before each part with a line that describes it.
    """
    end_s = time.monotonic() + limit_s
    use_tensor_cores(precision)
    begin("kernel launches and memory")
    launch_s, memory_bandwidth_bytes_per_s = _launch_s(device), _memory_bandwidth_bytes_per_s(device)
    grid = grid_for(_rate(_PROBE, _PROBE, _PROBE, precision, device), limit_s)
    rates: list[list[list[float]]] = []
    for rows in grid.rows:
        begin(f"products with {rows} rows, up to {grid.rows[-1]}")
        measured = []
        for inner in grid.widths:
            measured.append([_rate(rows, inner, outer, precision, device) for outer in grid.widths])
            if time.monotonic() > end_s and rates:
                # Slower than planned: the sizes so far are a grid too.
                return KindRates(
                    Grid(grid.rows[: len(rates)], grid.widths), rates, launch_s, memory_bandwidth_bytes_per_s
                )
        rates.append(measured)
    return KindRates(grid, rates, launch_s, memory_bandwidth_bytes_per_s)


def grid_for(flop_per_s: float, limit_s: float) -> Grid:
    """Return the largest grid that takes about ``limit_s`` seconds at most on a device of this speed, with a reserve.

    Where the time is short, the grid is first made coarser, then smaller.
    """
    finest = ((_ROWS, _WIDTHS), (_ROWS, _WIDTHS[1::2]), (_ROWS[::2], _WIDTHS[1::3]))
    most_s = _PLANNED_SHARE * limit_s
    for chosen_rows, chosen_widths in finest:
        grid = Grid(chosen_rows, chosen_widths)
        while grid.planned_s(flop_per_s) > most_s and min(len(grid.rows), len(grid.widths)) > 2:
            # Large products take nearly all of the time.
            grid = (
                Grid(grid.rows, grid.widths[:-1])
                if grid.widths[-1] > grid.rows[-1]
                else Grid(grid.rows[:-1], grid.widths)
            )
        if grid.planned_s(flop_per_s) <= most_s and grid.widths[-1] >= 1024:
            return grid
    return grid


def _rate(rows: int, inner: int, outer: int, precision: str, device: torch.device) -> float:
    """Return the FLOP/s of a product of samples with the weights of a linear layer, which are outer x inner."""
    dtype = boundary_dtype(precision)
    samples = torch.randn(rows, inner, device=device, dtype=dtype)
    weights = torch.randn(outer, inner, device=device, dtype=dtype)

    def multiply(times: int) -> float:
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(times):
            torch.mm(samples, weights.t())
        synchronize(device)
        return time.perf_counter() - start_s

    multiply(1)
    once_s = multiply(1)
    times = max(1, ceil(_LEAST_S / _REPEATS / max(once_s, 1e-7)))
    seconds = median(multiply(times) for _ in range(_REPEATS)) / times
    return 2 * rows * inner * outer / seconds


def _launch_s(device: torch.device) -> float:
    """Return the time of a kernel without work in a forward, whose operations autograd records."""
    number = torch.ones(1, device=device, requires_grad=True)

    def launch() -> None:
        result = number
        for _ in range(_LAUNCHES):
            result = result * number

    return median(_seconds(launch, device) for _ in range(_ROUNDS)) / _LAUNCHES


def _memory_bandwidth_bytes_per_s(device: torch.device) -> float:
    size_bytes = _COPIED_BYTES[device.type]
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size_bytes / median(_seconds(lambda: target.copy_(source), device) for _ in range(_ROUNDS))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start_s
