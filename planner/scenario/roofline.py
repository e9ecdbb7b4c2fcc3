"""Layer times from a layer's work and a datasheet, for devices on which the model was not measured.

A pass over a layer takes a fixed overhead plus the longer of its arithmetic and its memory traffic:

    time = LAUNCH_OVERHEAD_S
           + max(flop / (COMPUTE_EFFICIENCY * peak), bytes / (MEMORY_EFFICIENCY * memory bandwidth))
    bytes = parameters + samples * (output + ACTIVATION_PASSES * activations kept)

The constants are a least-squares fit of log times to what eth-easl/sailor measured without tensor
parallelism at sequence length T = 2048: forward and backward of the transformer blocks of OPT-350 and
GPT-Neo-2.7 (width d; 24 d^2 T + 4 T^2 d FLOP per sample forward, twice that backward), and forward of the
embedding of OPT-350, which is nearly all overhead.

Those runs held 32-bit tensors and multiplied in TF32 where the GPU has it: a GPT-Neo-2.7 block reaches
75 TFLOP/s on A100, whose plain fp32 ends at 19.5, and 13 TFLOP/s on V100, 84 % of its fp32 peak.

What is left: over 46 combinations of block, GPU kind and microbatch, forward + backward is off by 12 % in
the mean, 8 % in the median, 37 % at worst (GPT-Neo-2.7 on V100 is that much faster than one fp32 efficiency
for all allows). The source's "RTX-2080" is left out: with 0.62 of the peak of its Titan RTX it runs at 0.94
of its speed, so it is probably a 2080 Ti. Wider layers do better: OPT-30 in plain fp32 on A100, not fitted,
reaches 93 % of the peak.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner.scenario.datasheet import PRECISIONS, DeviceKind
from planner.scenario.profile import LayerProfile, TimeTable
from traces.common.errors import InputError, unknown_name

# Share of the peak that the arithmetic of a whole layer reaches. Fitted for fp32 and tf32; fp16 and bf16 were
# not measured and are taken to be like tf32, which runs on the same tensor cores.
COMPUTE_EFFICIENCY: Mapping[str, float] = MappingProxyType({"fp32": 0.59, "tf32": 0.46, "fp16": 0.46, "bf16": 0.46})

# Share of the memory bandwidth that elementwise kernels reach. Assumed: times tell only the next constant
# divided by this one.
MEMORY_EFFICIENCY = 0.8

# How often one pass moves each byte that is kept for backward. Fitted to blocks that write their attention
# matrices to memory and run softmax and dropout over them one kernel at a time.
ACTIVATION_PASSES = 9.4

# Seconds per pass to start a layer's kernels from Python. Fitted.
LAUNCH_OVERHEAD_S = 160e-6

SAMPLE_COUNTS = tuple(2**power for power in range(11))


@dataclass(frozen=True)
class LayerWork:
    """Work and bytes of one layer, whatever the device.

    Attributes:
        name: Name of the layer, for people.
        forward_flop: Floating-point operations of the forward for one sample.
        parameter_bytes: Bytes of its parameters, in the training precision as all bytes here.
        output_bytes: Bytes of its output for one sample.
        activation_bytes: Bytes that it saves for one sample from forward to backward.
        backward_input_flop: Operations of the input gradient for one sample, by default as many as forward; with 0
            there is no such gradient (an embedding), and it takes no time.
        backward_weight_flop: Operations of the weight gradient for one sample; without parameters there is none.

    Raises:
        InputError: An amount is negative or not finite.
    """

    name: str
    forward_flop: float
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    backward_input_flop: float | None = None
    backward_weight_flop: float | None = None

    def __post_init__(self) -> None:
        flop = (self.forward_flop, self.backward_input_flop or 0.0, self.backward_weight_flop or 0.0)
        sizes = (self.parameter_bytes, self.output_bytes, self.activation_bytes)
        if any(not 0 <= amount < float("inf") for amount in (*flop, *sizes)):
            raise InputError(
                f"layer '{self.name}' has an amount of work or bytes that is negative or not finite",
                valid="FLOP and bytes are finite and not negative",
            )


def roofline_layer(
    work: LayerWork,
    kinds: Iterable[DeviceKind],
    precision: str,
    *,
    launch_overhead_s: float = LAUNCH_OVERHEAD_S,
) -> LayerProfile:
    """Return a layer's profile on each kind, with rows at powers of two from 1 to 1024 samples.

    Args:
        work: Work of the layer.
        kinds: Device kinds, usually from `planner.scenario.datasheet.find_kind`.
        precision: Precision of the arithmetic: fp32, tf32, fp16 or bf16. A kind without it computes in fp32.
        launch_overhead_s: Seconds per pass beside arithmetic and memory.

    Raises:
        InputError: The precision is unknown.
    """
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    return LayerProfile(
        work.name,
        work.parameter_bytes,
        work.output_bytes,
        work.activation_bytes,
        {kind.name: _time_table(work, kind, precision, launch_overhead_s) for kind in kinds},
    )


def _time_table(work: LayerWork, kind: DeviceKind, precision: str, launch_overhead_s: float) -> TimeTable:
    def column(flop: float) -> tuple[float, ...]:
        return tuple(launch_overhead_s + _busy_s(work, flop, kind, precision, samples) for samples in SAMPLE_COUNTS)

    def gradient(flop: float | None) -> tuple[float, ...]:
        if flop == 0:
            return (0.0,) * len(SAMPLE_COUNTS)
        return column(work.forward_flop if flop is None else flop)

    return TimeTable(
        SAMPLE_COUNTS,
        forward_s=column(work.forward_flop),
        backward_input_s=gradient(work.backward_input_flop),
        backward_weight_s=gradient(work.backward_weight_flop if work.parameter_bytes else 0.0),
    )


def _busy_s(work: LayerWork, flop: float, kind: DeviceKind, precision: str, samples: int) -> float:
    arithmetic = precision if precision in kind.peak_flops else "fp32"
    compute_s = samples * flop / (COMPUTE_EFFICIENCY[arithmetic] * kind.peak_flops[arithmetic])
    moved_bytes = work.parameter_bytes + samples * (work.output_bytes + ACTIVATION_PASSES * work.activation_bytes)
    memory_s = moved_bytes / (MEMORY_EFFICIENCY * kind.memory_bandwidth_bytes_per_s)
    return max(compute_s, memory_s)
