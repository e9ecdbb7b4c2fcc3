"""How a layer is divided among the devices of a tensor-parallel group, as in Megatron-LM (arXiv 1909.08053).

A stage may end at any layer, so that each layer takes its full input, and leaves its full output, on every device:

    column      a matrix divided along its outputs; forward gathers the outputs, backward sums the input's gradient
    row         a matrix divided along its inputs; forward sums the outputs, backward gathers the input's gradient
    heads       a pair of a column and a row with heads or activation functions between them, as attention or an MLP:
                forward sums the outputs, backward the input's gradient
    block       a transformer block: two such pairs
    vocabulary  the first layer's table, divided by tokens: forward sums the outputs; or the last layer's matrix, whose
                loss needs only a few numbers of each device: backward sums the input's gradient

Sources: sections 3 of the paper; an all-gather moves half of the bytes of an all-reduce.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner.scenario.profile import NO_SUMS, GroupSums

SHARDINGS = ("column", "row", "heads", "block", "vocabulary")


@dataclass(frozen=True, slots=True)
class Sharding:
    """The division of a layer's matrices; all bytes are those of training in float32.

    Attributes:
        parts: The matrices can be divided into any number of parts that divides this number; 0 for any number.
        replicated_parameter_bytes: Bytes of the parameters that every device holds, such as those of norms.
        replicated_activation_bytes: Bytes of the saved activations of a sample that every device holds in full.
        forward_sums: Sums over the group in the forward.
        backward_sums: Sums over the group in the input gradient.
        replicated_fixed_bytes: The part of ``replicated_activation_bytes`` that is the same in every precision.
        rows: Number of rows of a divided table, of which each device has equally many: if the number of devices does
            not divide it, the layer is replicated. 0 if there is no such table.
    """

    parts: int
    replicated_parameter_bytes: int
    replicated_activation_bytes: int
    forward_sums: GroupSums
    backward_sums: GroupSums
    replicated_fixed_bytes: int = 0
    rows: int = 0


def named_sharding(
    name: str,
    input_bytes: int,
    output_bytes: int,
    activation_bytes: int,
    *,
    parts: int = 0,
    is_first: bool = False,
    parameter_bytes: int = 0,
    fixed_bytes: int = 0,
) -> Sharding:
    """Return the sharding of one of `SHARDINGS` for a layer that is known by its sizes only.

    Every device saves what enters a divided pair (or matrix): its input and, in a block, that of a norm before it, each
    as large as the layer's input or output.

    Args:
        name: One of `SHARDINGS`.
        input_bytes: Bytes of the layer's input for one sample.
        output_bytes: Bytes of its output for one sample.
        activation_bytes: Bytes that the layer saves for one sample.
        parts: As in `Sharding`.
        is_first: Whether the layer is the first of the model, whose input has no gradient.
        parameter_bytes: Bytes of the parameters that every device holds.
        fixed_bytes: The part of ``activation_bytes`` that is the same in every precision.
    """
    if name == "vocabulary" and is_first:
        # Every device saves all tokens.
        return Sharding(parts, parameter_bytes, activation_bytes, GroupSums(1, output_bytes), NO_SUMS, fixed_bytes)
    summed = GroupSums(1, output_bytes)
    to_input = NO_SUMS if is_first else GroupSums(1, input_bytes)
    forward, backward, replicated_bytes = _PASSES[name](summed, to_input)
    return Sharding(parts, parameter_bytes, min(activation_bytes, replicated_bytes), forward, backward)


def _half(sums: GroupSums) -> GroupSums:
    return GroupSums(sums.count, sums.sample_bytes // 2)


# Each returns the forward's sums, the backward's, and the bytes of activations that every device holds in full, from an
# all-reduce of the outputs and one of the input's gradient.
_PASSES: Mapping[str, Callable[[GroupSums, GroupSums], tuple[GroupSums, GroupSums, int]]] = MappingProxyType(
    {
        "column": lambda out, into: (_half(out), into, into.sample_bytes),
        "row": lambda out, into: (out, _half(into), 0),
        "heads": lambda out, into: (out, into, 2 * into.sample_bytes),
        "block": lambda out, into: (out + out, into + into, 2 * (into.sample_bytes + out.sample_bytes)),
        # The matrix of the last layer.
        "vocabulary": lambda out, into: (NO_SUMS, into, 2 * into.sample_bytes),
    }
)
