"""Reads layer profiles of SamsungLabs/Metis: a JSON file for each GPU kind, tensor parallelism and batch.

    DeviceType.A100_tp1_bs4.json
    {"model": {"model_name": "GPT3", "parameters": {"parameters_per_layer_bytes": [bytes of each layer]}},
     "execution_time": {"layer_compute_total_ms": [forward and backward of each layer, ms],
                        "forward_backward_time_ms": of the whole model, "optimizer_time_ms": of the whole model},
     "execution_memory": {"layer_memory_total_mb": [MiB that each layer's training reserved]}}

README.md of that repository describes the format, and its data_loader.py reads it; other keys are ignored. Metis adds
the time by which ``forward_backward_time_ms`` exceeds the sum of the layers to the last stage; this module adds it to
the forward of the last layer, which computes the loss.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from planner.files.importers import Amount, Whole, read_file
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from traces.common.errors import InputError

# Share of the forward in a layer's total time. Assumption: forward, input and weight gradient take equal times.
FORWARD_SHARE = 1 / 3

_NAME = re.compile(r"DeviceType\.(?P<kind>\w+?)_tp(?P<degree>[1-9]\d*)_bs(?P<samples>[1-9]\d*)\.json")
_MIB = 2**20


@dataclass(frozen=True)
class _Parameters:
    parameters_per_layer_bytes: list[Whole]


@dataclass(frozen=True)
class _Model:
    parameters: _Parameters
    model_name: str = "metis"


@dataclass(frozen=True)
class _Time:
    layer_compute_total_ms: list[Amount]
    forward_backward_time_ms: Annotated[Amount, Field(gt=0)] | None = None
    optimizer_time_ms: Amount | None = None


@dataclass(frozen=True)
class _Memory:
    layer_memory_total_mb: list[Amount]


@dataclass(frozen=True)
class _Entry:
    model: _Model
    execution_time: _Time
    execution_memory: _Memory


# Batch size in samples to the measurement with this batch size.
_Rows = dict[int, _Entry]


def read_metis(paths: Sequence[Path], output_bytes: int, kinds: Mapping[str, str]) -> ModelProfile:
    """Return the profile of a model from its files; files with tensor parallelism are ignored.

    The activations that a layer saves per sample are estimated by the growth of its memory from the smallest to the
    largest batch, divided by the growth in samples, and at least the layer's output. Memory lists whose length differs
    from the number of layers are ignored (one published file lists nine of ten layers). The optimizer's time is divided
    among the layers in proportion to their parameters.

    Args:
        paths: Paths of the files, named as above.
        output_bytes: Bytes of a layer's output for one sample, which the files do not contain; Metis computes them from
            the width and the sequence length of the model.
        kinds: GPU name in the files to device kind of ropebridge; other names are used in lower case.

    Raises:
        InputError: A file is missing, named differently or malformed, or the files are of several models.
    """
    measured: dict[str, _Rows] = {}
    first: tuple[Path, _Entry] | None = None
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise InputError(
                "the file's name does not say what was measured",
                where=str(path),
                valid="name it DeviceType.KIND_tpDEGREE_bsSAMPLES.json, such as DeviceType.A100_tp1_bs4.json",
            )
        if match["degree"] != "1":
            continue
        entry = read_file(path, TypeAdapter(_Entry), __name__)
        first = first or (path, entry)
        _check(entry, path, *first)
        rows = measured.setdefault(kinds.get(match["kind"], match["kind"].lower()), {})
        if int(match["samples"]) in rows:
            raise InputError("another file has the same kind and batch", where=str(path), valid="give one of the two")
        rows[int(match["samples"])] = entry
    if first is None:
        raise InputError(
            "there is no file without tensor parallelism",
            where=", ".join(map(str, paths)) or "metis",
            valid="give those with '_tp1_' in their names",
        )
    model = first[1].model
    sizes = model.parameters.parameters_per_layer_bytes
    layers = [_layer(index, sizes, output_bytes, measured) for index in range(len(sizes))]
    return ModelProfile(model.model_name, tuple(layers))


def _check(entry: _Entry, path: Path, first_path: Path, first: _Entry) -> None:
    sizes = entry.model.parameters.parameters_per_layer_bytes
    if not sizes or len(entry.execution_time.layer_compute_total_ms) != len(sizes):
        raise InputError(
            f"times of {len(entry.execution_time.layer_compute_total_ms)} layers do not fit parameters of {len(sizes)}",
            where=str(path),
            valid="let 'layer_compute_total_ms' and 'parameters_per_layer_bytes' list the same layers, one at least",
        )
    if sizes != first.model.parameters.parameters_per_layer_bytes:
        raise InputError(f"the file has another model than {first_path}", where=str(path), valid="import one at a time")


def _layer(index: int, sizes: Sequence[int], output_bytes: int, measured: Mapping[str, _Rows]) -> LayerProfile:
    return LayerProfile(
        f"layer-{index}",
        sizes[index],
        output_bytes,
        max(output_bytes, *(_growth_bytes(index, len(sizes), rows) for rows in measured.values())),
        {kind: _table(index, len(sizes), rows) for kind, rows in measured.items()},
        {kind: update_s for kind, rows in measured.items() if (update_s := _update_s(index, sizes, rows)) is not None},
    )


def _growth_bytes(index: int, layers: int, rows: _Rows) -> int:
    memory = {samples: entry.execution_memory.layer_memory_total_mb for samples, entry in rows.items()}
    whole = [samples for samples in sorted(memory) if len(memory[samples]) == layers]
    if len(whole) < 2:
        return 0
    few, many = whole[0], whole[-1]
    return round(_MIB * (memory[many][index] - memory[few][index]) / (many - few))


def _table(index: int, layers: int, rows: _Rows) -> TimeTable:
    samples = sorted(rows)
    times = [rows[each].execution_time for each in samples]
    total_s = [each.layer_compute_total_ms[index] / 1000 for each in times]
    beyond_s = [_beyond_layers_s(each) if index == layers - 1 else 0.0 for each in times]
    # The first layer is the embedding, which has no input gradient.
    input_share = 0.0 if index == 0 else (1 - FORWARD_SHARE) / 2
    return TimeTable(
        tuple(samples),
        tuple(FORWARD_SHARE * each + more for each, more in zip(total_s, beyond_s, strict=True)),
        tuple(input_share * each for each in total_s),
        tuple((1 - FORWARD_SHARE - input_share) * each for each in total_s),
    )


def _beyond_layers_s(time: _Time) -> float:
    if time.forward_backward_time_ms is None:
        return 0.0
    return max(0.0, time.forward_backward_time_ms - sum(time.layer_compute_total_ms)) / 1000


def _update_s(index: int, sizes: Sequence[int], rows: _Rows) -> float | None:
    """Return the layer's share of the update's seconds, from the smallest batch; updates do not depend on the batch."""
    optimizer_ms = rows[min(rows)].execution_time.optimizer_time_ms
    if optimizer_ms is None or not sum(sizes):
        return None
    return optimizer_ms / 1000 * sizes[index] / sum(sizes)
