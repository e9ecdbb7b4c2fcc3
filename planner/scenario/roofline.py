"""Estimate layer times from FLOP, bytes and a datasheet, for devices on which the model was not measured.

A pass over a layer takes a fixed overhead plus the longer of its arithmetic and its memory traffic:

    time = LAUNCH_OVERHEAD_S
           + max(flop / (COMPUTE_EFFICIENCY * peak), bytes / (MEMORY_EFFICIENCY * memory bandwidth))
    bytes = parameters as computed with + samples * (output + ACTIVATION_PASSES * activations saved for backward)

``flop`` and ``bytes`` are the operations and bytes of the pass in the training precision, ``peak`` is the GPU's FLOP/s
in it.

The constants are a least-squares fit of log times to what eth-easl/sailor measured without tensor
parallelism at sequence length T = 2048: forward and backward of the transformer blocks of OPT-350 and
GPT-Neo-2.7 (width d; 24 d^2 T + 4 T^2 d FLOP per sample forward, twice that backward), and forward of the
embedding of OPT-350, where the overhead is nearly all of the time.

Those runs held 32-bit tensors and multiplied in TF32 where the GPU has it: a GPT-Neo-2.7 block reaches
75 TFLOP/s on A100, whose plain fp32 ends at 19.5, and 13 TFLOP/s on V100, 84 % of its fp32 peak.

Error of the fit: over 46 combinations of block, GPU kind and microbatch, forward + backward differs from the
measurement by 12 % in the mean, 8 % in the median, 37 % at most (GPT-Neo-2.7 on V100, which is faster than a
single fp32 efficiency for all kinds allows). The "RTX-2080" of sailor is left out: it has 0.62 of the peak of the
Titan RTX but 0.94 of its measured speed, so it is probably a 2080 Ti. Wider layers reach a larger share of the
peak: OPT-30 in plain fp32 on A100, which is not in the fit, 93 %.

A kind may have a table of rates measured by shape (`planner.scenario.kind_table`). The kernels of a layer run one after
the other, so that a pass over a layer whose matrix products are known, or that has no operations, then takes

    time = sum over the products of max(flop / rate of its shape, launch time)
           + max(bytes / measured memory bandwidth, number of other kernels * launch time)

The input gradient of a product rows x inner x outer is one of rows x outer x inner, and the weight gradient one of
inner x rows x outer. Operations outside the products are shared among them. The bytes are those above without the
parameters, which the products read. A layer's weight gradient is that of its products alone, if it has any.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from planner.scenario.datasheet import DeviceKind
from planner.scenario.kind_table import KindTable, MatrixProduct
from planner.scenario.profile import NO_SUMS, GroupSums, LayerProfile, MeasuredRates, ModelProfile, TimeTable
from planner.scenario.sharding import Sharding
from planner.scenario.training import FLOAT32_BYTES, PRECISIONS, Precision
from traces.common.errors import InputError, find_by_name

# Share of the peak FLOP/s that a whole layer reaches. Fitted for fp32 and tf32. Assumed for fp16, bf16 and fp8: the
# share of tf32, which runs on the same tensor cores. With it, tokens a second on A100 in bf16 differ by -15 to +9 %
# (-1 and +3 % for 7B) from those of the GPU hours in which Llama 7B to 65B and Llama 2 7B and 13B were trained (Touvron
# et al., arXiv 2302.13971, table 15, and 2307.09288, table 2), whose models reach 43 to 54 % of the peak.
COMPUTE_EFFICIENCY: Mapping[str, float] = MappingProxyType(
    {"fp32": 0.59, "tf32": 0.46, "fp16": 0.46, "bf16": 0.46, "fp8": 0.46}
)

# Share of the memory bandwidth that elementwise kernels reach. Assumption: measured times determine only the ratio
# ACTIVATION_PASSES / MEMORY_EFFICIENCY.
MEMORY_EFFICIENCY = 0.8

# How many times one pass reads or writes each byte of activations saved for backward. Fitted to blocks that write
# their attention matrices to memory, with one kernel each for softmax and dropout.
ACTIVATION_PASSES = 9.4

# Seconds per pass to launch a layer's kernels from Python. Fitted.
LAUNCH_OVERHEAD_S = 160e-6

SAMPLE_COUNTS = tuple(2**power for power in range(11))

# The share by which rounding may make the products of a layer more operations than its forward.
_ROUNDING = 1e-6

_NO_TABLES: Mapping[str, KindTable] = MappingProxyType({})


@dataclass(frozen=True)
class LayerWork:
    """FLOP and bytes of one layer, independent of the device.

    Attributes:
        forward_flop: Floating-point operations of the forward for one sample.
        parameter_bytes: Bytes of the layer's parameters; all bytes are those of training in float32.
        output_bytes: Bytes of the layer's output for one sample.
        activation_bytes: Bytes of activations that the layer saves for one sample from forward to backward.
        fixed_bytes: The part of ``activation_bytes`` that is the same in every precision, such as token numbers.
        sharding: How the devices of a tensor-parallel group divide the layer; None if each of them computes all of it.
        backward_input_flop: Operations of the input gradient for one sample; None for as many as the forward; 0 if the
            layer has no input gradient (an embedding).
        backward_weight_flop: Operations of the weight gradient for one sample; None for as many as the forward; ignored
            for a layer without parameters.
        tied_bytes: As in `planner.scenario.profile.LayerProfile`.
        products: Matrix products of the forward; none if they are not known.
        kernels: Number of kernels of the forward; 0 if it is not known.

    Raises:
        InputError: An amount is negative or not finite, or the products have more operations than the forward.
    """

    name: str
    forward_flop: float
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    backward_input_flop: float | None = None
    backward_weight_flop: float | None = None
    fixed_bytes: int = 0
    sharding: Sharding | None = None
    tied_bytes: int = 0
    products: tuple[MatrixProduct, ...] = ()
    kernels: int = 0

    def __post_init__(self) -> None:
        flop = (self.forward_flop, self.backward_input_flop or 0.0, self.backward_weight_flop or 0.0)
        sizes = (self.parameter_bytes, self.output_bytes, self.activation_bytes - self.fixed_bytes, self.fixed_bytes)
        if any(not 0 <= amount < float("inf") for amount in (*flop, *sizes)):
            raise InputError(
                f"layer '{self.name}' has an amount of work or bytes that is negative or not finite",
                valid="FLOP and bytes are finite and not negative",
            )
        in_products = sum(each.flop for each in self.products)
        if in_products > (1 + _ROUNDING) * self.forward_flop:
            raise InputError(
                f"the products of layer '{self.name}' have {in_products:.6g} FLOP a sample, but its forward has "
                f"{self.forward_flop:.6g}",
                valid="give 2 * rows * inner * outer FLOP to the forward for each product, or more",
            )


def shard_of(work: LayerWork, degree: int) -> LayerWork:
    """Return the work of one of ``degree`` devices that divide a layer as its sharding says."""
    sharding = work.sharding
    if sharding is None or degree == 1:
        return work
    if sharding.rows % degree:
        return replace(work, sharding=None)

    def shard(size_bytes: int, replicated_bytes: int) -> int:
        return replicated_bytes + -(-max(0, size_bytes - replicated_bytes) // degree)

    def part(flop: float | None) -> float | None:
        return None if flop is None else flop / degree

    return replace(
        work,
        forward_flop=work.forward_flop / degree,
        backward_input_flop=part(work.backward_input_flop),
        backward_weight_flop=part(work.backward_weight_flop),
        parameter_bytes=shard(work.parameter_bytes, sharding.replicated_parameter_bytes),
        activation_bytes=shard(work.activation_bytes, sharding.replicated_activation_bytes),
        fixed_bytes=shard(work.fixed_bytes, sharding.replicated_fixed_bytes),
        tied_bytes=work.tied_bytes // degree,
        products=tuple(each.part(degree) for each in work.products),
    )


def sharded_models(
    name: str,
    works: Sequence[LayerWork],
    kinds: Iterable[DeviceKind],
    precision: str,
    most: int,
    tables: Mapping[str, KindTable] = _NO_TABLES,
) -> dict[int, ModelProfile]:
    """Return the profiles of one device of a tensor-parallel group, by the number of devices, from 2 to ``most``.

    There is none unless some layer has a sharding. Layers without one are replicated on every device.
    """
    parts = [work.sharding.parts for work in works if work.sharding is not None]
    if not parts:
        return {}
    kinds = tuple(kinds)
    degrees = (each for each in range(2, most + 1) if all(count % each == 0 for count in parts))
    return {
        degree: ModelProfile(
            name, tuple(roofline_layer(shard_of(work, degree), kinds, precision, tables) for work in works)
        )
        for degree in degrees
    }


def roofline_layer(
    work: LayerWork, kinds: Iterable[DeviceKind], precision: str, tables: Mapping[str, KindTable] = _NO_TABLES
) -> LayerProfile:
    """Return a layer's profile on device kinds, with rows at powers of two from 1 to 1024 samples.

    ``precision`` is one of `planner.scenario.training.PRECISIONS`. A kind whose datasheet lacks it computes in fp32.
    ``tables`` are measured rates in this precision, by kind.

    Raises:
        InputError: The precision is unknown.
    """
    formats = find_by_name(precision, PRECISIONS, "precision")
    converted = replace(
        work,
        output_bytes=formats.converted_bytes(work.output_bytes),
        activation_bytes=formats.converted_bytes(work.activation_bytes - work.fixed_bytes) + work.fixed_bytes,
    )
    return LayerProfile(
        work.name,
        work.parameter_bytes,
        converted.output_bytes,
        converted.activation_bytes,
        {kind.name: _time_table(converted, kind, formats, tables.get(kind.name)) for kind in kinds},
        forward_sums=_converted(work.sharding.forward_sums if work.sharding else NO_SUMS, formats),
        backward_sums=_converted(work.sharding.backward_sums if work.sharding else NO_SUMS, formats),
        tied_bytes=work.tied_bytes,
    )


def _converted(sums: GroupSums, formats: Precision) -> GroupSums:
    return GroupSums(sums.count, formats.converted_bytes(sums.sample_bytes))


# The sizes of a product in a pass, given the product and its rows for all samples: rows, inner and outer.
_Shape = Callable[[MatrixProduct, float], tuple[float, float, float]]


def _forward(each: MatrixProduct, rows: float) -> tuple[float, float, float]:
    return rows, each.inner, each.outer


def _input_gradient(each: MatrixProduct, rows: float) -> tuple[float, float, float]:
    return rows, each.outer, each.inner


def _weight_gradient(each: MatrixProduct, rows: float) -> tuple[float, float, float]:
    return each.inner, rows, each.outer


def _time_table(work: LayerWork, kind: DeviceKind, formats: Precision, table: KindTable | None) -> TimeTable:
    def column(flop: float, shape: _Shape) -> tuple[float, ...]:
        if table is not None and (work.products or not flop):
            return tuple(_measured_s(work, flop, table, formats, shape, samples) for samples in SAMPLE_COUNTS)
        return tuple(LAUNCH_OVERHEAD_S + _busy_s(work, flop, kind, formats, samples) for samples in SAMPLE_COUNTS)

    def gradient(flop: float | None, shape: _Shape) -> tuple[float, ...]:
        if flop == 0:
            return (0.0,) * len(SAMPLE_COUNTS)
        return column(work.forward_flop if flop is None else flop, shape)

    return TimeTable(
        SAMPLE_COUNTS,
        forward_s=column(work.forward_flop, _forward),
        backward_input_s=gradient(work.backward_input_flop, _input_gradient),
        backward_weight_s=gradient(_weight_flop(work), _weight_gradient),
        rates=_measured_rates(work, table),
    )


def _weight_flop(work: LayerWork) -> float | None:
    return work.backward_weight_flop if work.parameter_bytes else 0.0


def _measured_rates(work: LayerWork, table: KindTable | None) -> MeasuredRates | None:
    """Return the table that gives a layer's times, and the microbatches whose products have measured sizes."""
    if table is None or (work.forward_flop and not work.products):
        return None
    passes = (
        (work.forward_flop, _forward),
        (work.backward_input_flop, _input_gradient),
        (_weight_flop(work), _weight_gradient),
    )
    least, most = 1, math.inf
    for each in work.products:
        for flop, shape in passes:
            sizes = zip(
                (table.rows, table.inner, table.outer), shape(each, each.rows), shape(each, 2 * each.rows), strict=True
            )
            for measured, of_one, of_two in sizes if flop != 0 else ():
                if of_two > of_one:
                    least = max(least, math.ceil(measured[0] / of_one))
                    most = min(most, measured[-1] // of_one)
                elif not measured[0] <= of_one <= measured[-1]:
                    most = 0
    return MeasuredRates(table.source, least, None if most == math.inf else int(most))


def _measured_s(
    work: LayerWork, flop: float, table: KindTable, formats: Precision, shape: _Shape, samples: int
) -> float:
    products_s = 0.0
    if flop:
        scale = samples * flop / sum(each.flop for each in work.products)
        products_s = sum(
            max(scale * each.flop / table.rate(*shape(each, samples * each.rows)), each.count * table.launch_s)
            for each in work.products
        )
        if shape is _weight_gradient:
            return products_s
    kernels = max(0, work.kernels - sum(each.count for each in work.products))
    moved_bytes = samples * _sample_bytes(work) + (0.0 if work.products else _used_bytes(work, formats))
    return products_s + max(moved_bytes / table.memory_bandwidth_bytes_per_s, kernels * table.launch_s)


def _busy_s(work: LayerWork, flop: float, kind: DeviceKind, formats: Precision, samples: int) -> float:
    arithmetic = formats.arithmetic if formats.arithmetic in kind.peak_flops else "fp32"
    compute_s = samples * flop / (COMPUTE_EFFICIENCY[arithmetic] * kind.peak_flops[arithmetic])
    moved_bytes = _used_bytes(work, formats) + samples * _sample_bytes(work)
    memory_s = moved_bytes / (MEMORY_EFFICIENCY * kind.memory_bandwidth_bytes_per_s)
    return max(compute_s, memory_s)


def _used_bytes(work: LayerWork, formats: Precision) -> int:
    """Return the bytes of the parameters that a pass reads."""
    return work.parameter_bytes * (formats.copy_bytes or FLOAT32_BYTES) // FLOAT32_BYTES


def _sample_bytes(work: LayerWork) -> float:
    """Return the bytes that a pass moves for one sample."""
    return work.output_bytes + ACTIVATION_PASSES * work.activation_bytes
