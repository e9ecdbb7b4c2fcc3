"""Reads layer times and sizes as eth-easl/sailor publishes them, in two JSON files.

    times: model -> GPU kind -> microbatch -> tensor parallelism -> layer -> [forward s, backward s, update s]
    sizes: model -> tensor parallelism -> layer -> {"params_bytes", "act_output_bytes", "act_mem_bytes", ...}

All keys are strings. Layers count from "0", the embedding. Tensors are 32-bit; sizes are for one sample. Only the first
layer, one or two blocks and the last layer of a model were measured; the rows of other blocks are copies.
"""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from statistics import median
from types import MappingProxyType

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from planner.files.importers import Whole, pick, read_file
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from traces.common.errors import InputError

# Device kind of ropebridge by the GPU's name in the files. The RTX-2080 is probably an RTX 2080 Ti: see
# planner/scenario/roofline.py.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "A100-40": "a100-40",
        "A100-80": "a100-80",
        "GH-96": "gh200-96",
        "RTX-2080": "rtx-2080",
        "RTX-3090": "rtx-3090",
        "Titan-RTX": "titan-rtx",
        "V100-16": "v100-16",
    }
)

# The precision in which all of them were measured.
PRECISION = "fp32"

Row = Mapping[int, tuple[float, float, float]]


def updates_s(rows: Mapping[int, Row], parameter_bytes: Mapping[int, int]) -> dict[int, float]:
    """Return the seconds of each layer's update: its share, by parameters, of the update of all measured layers.

    ``rows`` gives (forward s, backward s, update s) by microbatch and layer; an update does not depend on the
    microbatch. ``parameter_bytes`` gives the bytes of the parameters by layer.
    """
    per_byte_s = median(_per_byte_s(row, parameter_bytes) for row in rows.values())
    return {layer: per_byte_s * size_bytes for layer, size_bytes in parameter_bytes.items()}


def _per_byte_s(row: Row, parameter_bytes: Mapping[int, int]) -> float:
    updated_bytes = sum(parameter_bytes[layer] for layer in measured_layers(row))
    return max(update_s for *_, update_s in row.values()) / updated_bytes if updated_bytes else 0.0


def measured_layers(row: Row) -> list[int]:
    """Return the layers whose times differ from those of the previous layer; other layers are copies."""
    return [layer for layer in sorted(row) if layer - 1 not in row or row[layer][:2] != row[layer - 1][:2]]


@dataclass(frozen=True)
class _LayerSizes:
    params_bytes: Whole
    act_output_bytes: Whole
    act_mem_bytes: Whole


_Row = dict[int, tuple[float, float, float]]
_Times = dict[str, dict[str, dict[int, dict[int, _Row]]]]
_Sizes = dict[str, dict[int, dict[int, _LayerSizes]]]


def profiled_models(times_path: Path) -> list[str]:
    """Return the names of the models in a file of times."""
    return sorted(read_file(times_path, TypeAdapter(_Times), __name__))


def read_sailor(times_path: Path, sizes_path: Path, model_name: str) -> ModelProfile:
    """Return the profile of one model from the two files, including the profiles of its tensor-parallel shards.

    Assumption: half of a backward is the input gradient and half the weight gradient; for the embedding, which has no
    input gradient, all of the backward is the weight gradient. A time that is longer than the time for more samples is
    lowered to the latter, because the device was not warm yet.

    The profile of a degree of tensor parallelism has the GPU kinds that were measured with this degree. Degrees without
    sizes are left out. ``model_name`` is the model's name in the files, such as ``OPT-350``.

    Raises:
        InputError: A file is missing or malformed, or has no such model or no known GPU kind.
    """
    times = pick(read_file(times_path, TypeAdapter(_Times), __name__), model_name, "model", where=str(times_path))
    sizes = pick(read_file(sizes_path, TypeAdapter(_Sizes), __name__), model_name, "model", where=str(sizes_path))
    where = f"{times_path}: {model_name}"
    for kind in times:
        pick(KINDS, kind, "GPU kind", where=where)
    pick(sizes, 1, "tensor parallelism", where=f"{sizes_path}: {model_name}")
    layers = {degree: _layers(times, degree, sizes[degree], where) for degree in sizes}
    shards = {
        degree: ModelProfile(model_name, shard)
        for degree, shard in sorted(layers.items())
        if degree > 1 and any(layer.times for layer in shard)
    }
    return ModelProfile(model_name, layers[1], shards)


def _layers(
    times: Mapping[str, Mapping[int, Mapping[int, _Row]]], degree: int, sizes: Mapping[int, _LayerSizes], where: str
) -> tuple[LayerProfile, ...]:
    """Return the layers as one GPU of ``degree`` holds them, for the GPU kinds measured with this degree."""
    measured = {
        kind: {samples: row[degree] for samples, row in sorted(rows.items()) if degree in row}
        for kind, rows in times.items()
    }
    measured = {kind: rows for kind, rows in measured.items() if rows}
    tables = {KINDS[kind]: _tables(rows, sorted(sizes), f"{where}.{kind}") for kind, rows in measured.items()}
    parameter_bytes = {index: layer.params_bytes for index, layer in sizes.items()}
    updates = {KINDS[kind]: updates_s(rows, parameter_bytes) for kind, rows in measured.items()}
    return tuple(
        LayerProfile(
            name=f"layer-{index}",
            parameter_bytes=sizes[index].params_bytes,
            output_bytes=sizes[index].act_output_bytes,
            activation_bytes=sizes[index].act_mem_bytes,
            times={kind: table[index] for kind, table in tables.items()},
            update_s={kind: update_s[index] for kind, update_s in updates.items()},
        )
        for index in sorted(sizes)
    )


def _tables(rows: Mapping[int, _Row], layers: list[int], where: str) -> dict[int, TimeTable]:
    for samples, row in rows.items():
        if sorted(row) != layers:
            raise InputError(
                f"the file has {len(row)} layers, but the sizes file has {len(layers)}",
                where=f"{where}.{samples}",
                valid="both files must list the same layers",
            )
    try:
        return {index: _table(rows, index) for index in layers}
    except InputError as error:
        raise error.within(where) from None


def _table(rows: Mapping[int, _Row], index: int) -> TimeTable:
    forward_s = _never_shorter([row[index][0] for row in rows.values()])
    backward_s = _never_shorter([row[index][1] for row in rows.values()])
    input_share = 0.0 if index == 0 else 0.5
    return TimeTable(
        samples=tuple(rows),
        forward_s=tuple(forward_s),
        backward_input_s=tuple(input_share * time_s for time_s in backward_s),
        backward_weight_s=tuple((1 - input_share) * time_s for time_s in backward_s),
    )


def _never_shorter(times_s: list[float]) -> list[float]:
    """Return the times, each lowered to the minimum of all later times."""
    return list(accumulate(reversed(times_s), min))[::-1]
