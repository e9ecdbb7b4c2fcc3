"""Layer times and sizes as eth-easl/sailor publishes them: two JSON files.

    times: model -> GPU kind -> microbatch -> tensor parallelism -> layer -> [forward s, backward s, update s]
    sizes: model -> tensor parallelism -> layer -> {"params_bytes", "act_output_bytes", "act_mem_bytes", ...}

All keys are strings. Layers count from "0", the embedding. Tensors are 32-bit; sizes are for one sample.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from planner.profile import LayerProfile, ModelProfile, TimeTable
from traces.errors import InputError
from traces.naming import unknown_name

# Their name to ours. What they call RTX-2080 is probably an RTX 2080 Ti (see planner/roofline.py).
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


@dataclass(frozen=True)
class _LayerSizes:
    params_bytes: int
    act_output_bytes: int
    act_mem_bytes: int


_Layers = dict[int, tuple[float, float, float]]
_Times = dict[str, dict[str, dict[int, dict[int, _Layers]]]]
_Sizes = dict[str, dict[int, dict[int, _LayerSizes]]]
_Key = TypeVar("_Key", str, int)
_Value = TypeVar("_Value")


def read_sailor(times_path: Path, sizes_path: Path, model_name: str, *, tensor_parallel: int = 1) -> ModelProfile:
    """Return the profile of one model from the two files.

    The files give backward as a whole; half of it is taken to be the input gradient and half the weight
    gradient, all of it the weight gradient for the embedding, which has no input gradient. Only GPU kinds
    that were measured with this degree of tensor parallelism appear. The update times are not used.

    Args:
        times_path: Such as ``layer_times.json``.
        sizes_path: Such as ``layer_sizes.json``.
        model_name: As in the files, ``OPT-350``.
        tensor_parallel: GPUs that share each layer; times and sizes are those of one of them.

    Raises:
        InputError: A file is missing or malformed, or has no such model, degree or known GPU kind.
    """
    times = _pick(_read(times_path, TypeAdapter(_Times)), model_name, "model", where=str(times_path))
    sizes = _pick(_read(sizes_path, TypeAdapter(_Sizes)), model_name, "model", where=str(sizes_path))
    times_place, sizes_place = f"{times_path}: {model_name}", f"{sizes_path}: {model_name}"
    layers = _pick(sizes, tensor_parallel, "tensor parallelism", where=sizes_place)
    measured = _measured(times, tensor_parallel, times_place)
    tables = {kind: _tables(rows, sorted(layers), f"{times_place}.{kind}") for kind, rows in measured.items()}
    return ModelProfile(
        model_name,
        tuple(
            LayerProfile(
                name=f"layer-{index}",
                parameter_bytes=layers[index].params_bytes,
                output_bytes=layers[index].act_output_bytes,
                activation_bytes=layers[index].act_mem_bytes,
                times={KINDS[kind]: table[index] for kind, table in tables.items()},
            )
            for index in sorted(layers)
        ),
    )


def _measured(
    times: dict[str, dict[int, dict[int, _Layers]]], tensor_parallel: int, where: str
) -> dict[str, dict[int, _Layers]]:
    """Return kind -> microbatch -> layers, with what was measured at this degree only."""
    degrees = {degree for rows in times.values() for row in rows.values() for degree in row}
    _pick(dict.fromkeys(sorted(degrees)), tensor_parallel, "tensor parallelism", where=where)
    measured = {}
    for kind, rows in times.items():
        _pick(KINDS, kind, "GPU kind", where=where)
        of_degree = {count: row[tensor_parallel] for count, row in sorted(rows.items()) if tensor_parallel in row}
        if of_degree:
            measured[kind] = of_degree
    return measured


def _tables(rows: dict[int, _Layers], layers: list[int], where: str) -> dict[int, TimeTable]:
    for microbatch, row in rows.items():
        if sorted(row) != layers:
            raise InputError(
                f"{len(row)} layers, but {len(layers)} in the sizes file",
                where=f"{where}.{microbatch}",
                valid="both files must list the same layers",
            )
    try:
        return {index: _table(rows, index) for index in layers}
    except InputError as error:
        raise error.within(where) from None


def _table(rows: dict[int, _Layers], index: int) -> TimeTable:
    backward_s = [row[index][1] for row in rows.values()]
    input_share = 0.0 if index == 0 else 0.5
    return TimeTable(
        samples=tuple(rows),
        forward_s=tuple(row[index][0] for row in rows.values()),
        backward_input_s=tuple(input_share * time_s for time_s in backward_s),
        backward_weight_s=tuple((1 - input_share) * time_s for time_s in backward_s),
    )


def _read(path: Path, shape: TypeAdapter[_Value]) -> _Value:
    try:
        return shape.validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        where = f"{path}: {place}" if place else str(path)
        raise InputError(
            first["msg"], where=where, valid="the module planner.importers.sailor describes the two files"
        ) from None


def _pick(choices: Mapping[_Key, _Value], key: _Key, what: str, *, where: str) -> _Value:
    if key not in choices:
        raise unknown_name(what, str(key), map(str, choices), where=where)
    return choices[key]
