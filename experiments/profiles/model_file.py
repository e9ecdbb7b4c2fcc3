"""Writes model files, which hold each layer's costs on each kind of device, and adds further kinds to them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from planner.files.documents import Document
from planner.scenario.profile import LayerProfile, PassMemory, TimeTable, Workspace
from planner.scenario.roofline import LayerWork
from planner.scenario.scenario import Code, HuggingFaceCode
from planner.scenario.sharding import Sharding
from planner.scenario.training import DEFAULT_PRECISION, PRECISIONS
from traces.common.atomic import check_place, write_text_atomically
from traces.common.errors import InputError, find_by_name
from traces.common.units import parse_bytes, parse_duration_s, parse_flop


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """A model as it is written to files.

    Attributes:
        layers: Layers in order, with times on the measured kinds, or with the operations and bytes for a roofline.
        code: The model's code; None if only the layers' costs are known.
        precision: The precision of the layers' times and sizes; None for a roofline, and for fp32.
        measured_on: The device on which the times of each kind were measured, in words, by the kind.
    """

    name: str
    layers: Sequence[LayerProfile | LayerWork]
    code: Code | None = None
    precision: str | None = None
    measured_on: Mapping[str, str] = field(default_factory=dict)


def refuse_another_model(
    path: Path,
    name: str,
    code: Code | None = None,
    layers: int | None = None,
    precision: str | None = DEFAULT_PRECISION,
) -> None:
    """Check, before a measurement, that `add_to_model_file` will be able to add this model's costs to a file.

    The file need not exist. ``layers`` is the number of the model's layers, None if it is not known yet; ``precision``
    is that of the new costs, None if operations are counted.

    Raises:
        InputError: The file is damaged, or describes a model of another name, other code, another precision or another
            number of layers.
    """
    check_place(path)
    if path.exists():
        document = Document(path)
        old, known = document.value, _head(path, name, code, None)
        if not isinstance(old, Mapping) or {key: old.get(key) for key in known} != known:
            raise _another_model(path)
        if not isinstance(found := old.get("layers"), list) or layers not in (None, _count(found)):
            raise _another_model(path)
        _refuse_another_precision(document, precision)


def add_to_model_file(path: Path, model: ModelLayers) -> None:
    """Write a model's costs into a YAML or .json file; costs on other kinds of devices in the file stay.

    Raises:
        InputError: The file is of another model, or cannot be written.
    """
    new = _document(path, model)
    if path.exists():
        _take_over(Document(path), new, path)
    if path.suffix == ".json":
        text = json.dumps(new, indent=1) + "\n"
    else:
        text = yaml.safe_dump(new, sort_keys=False, width=120, default_flow_style=None)
    write_text_atomically(path, text)


def _head(path: Path, name: str, code: Code | None, precision: str | None) -> dict[str, Any]:
    """Return the keys of a file that describe the model, without its layers."""
    head: dict[str, Any] = {"name": name} if precision is None else {"name": name, "precision": precision}
    if code is None:
        return head
    place = os.path.relpath(code.source.resolve(), path.resolve().parent)
    if isinstance(code, HuggingFaceCode):
        return {**head, "huggingface": place, "tokens": code.tokens}
    return {**head, "code": place, "arguments": dict(code.arguments)}


def _count(entries: list[Any]) -> int:
    """Return the number of layers in a file, whose entries can each stand for several equal layers."""
    repeats = [entry.get("repeat", 1) if isinstance(entry, Mapping) else 1 for entry in entries]
    return sum(repeat if isinstance(repeat, int) else 1 for repeat in repeats)


def _document(path: Path, model: ModelLayers) -> dict[str, Any]:
    document = _head(path, model.name, model.code, model.precision)
    # Consecutive equal layers are one entry; when the file is read, each layer gets its number after the name.
    runs = [list(layers) for _, layers in groupby(model.layers, key=lambda layer: (layer.name, _layer(layer)))]
    measured = {"measured_on": dict(model.measured_on)} if model.measured_on else {}
    return document | measured | {"layers": [_layer(layers[0], repeat=len(layers)) for layers in runs]}


def _layer(layer: LayerProfile | LayerWork, repeat: int = 1) -> dict[str, Any]:
    sizes = {"parameters": layer.parameter_bytes, "output": layer.output_bytes, "activation": layer.activation_bytes}
    entry: dict[str, Any] = {"name": layer.name, **({"repeat": repeat} if repeat > 1 else {})}
    entry |= {key: f"{size} B" for key, size in sizes.items()}
    if layer.tied_bytes:
        entry["tied"] = f"{layer.tied_bytes} B"
    if isinstance(layer, LayerWork):
        forward = _exact(float(layer.forward_flop), {"GFLOP": 1e9, "MFLOP": 1e6, "FLOP": 1.0}, parse_flop)
        fixed = {"fixed": f"{layer.fixed_bytes} B"} if layer.fixed_bytes else {}
        return entry | {"forward": forward, **fixed, **_shard(layer.sharding), **_products(layer)}
    return (
        entry
        | _memory(layer.memory)
        | {"times": {kind: _times(table, layer.update_s.get(kind)) for kind, table in layer.times.items()}}
    )


def _memory(memory: PassMemory | None) -> dict[str, Any]:
    if memory is None:
        return {}
    split = {}
    if memory.split is not None:
        deferred = f"{memory.split.deferred_bytes} B"
        passes = {key: _workspace(getattr(memory.split, key)) for key in ("forward", "input", "weight")}
        split = {"split": {"deferred": deferred, **{key: each for key, each in passes.items() if each}}}
    output = {"output": f"{memory.output_bytes} B"} if memory.output_bytes else {}
    return {"memory": {**output, **_workspace(memory.workspace), **split}}


def _workspace(workspace: Workspace) -> dict[str, str]:
    sizes = {"fixed": workspace.fixed_bytes, "sample": workspace.sample_bytes}
    return {key: f"{size} B" for key, size in sizes.items() if size}


def _products(layer: LayerWork) -> dict[str, Any]:
    """Return the entries of a layer's matrix products and kernels, without those that are not known."""
    products = [
        {
            "rows": _whole(each.rows),
            "inner": _whole(each.inner),
            "outer": _whole(each.outer),
            **({"count": each.count} if each.count > 1 else {}),
            **({"divide": each.divide} if each.divide != "outer" else {}),
        }
        for each in layer.products
    ]
    kernels = {"kernels": layer.kernels} if layer.kernels else {}
    return ({"products": products} if products else {}) | kernels


def _whole(size: float) -> int | float:
    return int(size) if float(size).is_integer() else size


def _shard(sharding: Sharding | None) -> dict[str, Any]:
    if sharding is None:
        return {}
    sums = {"forward": sharding.forward_sums, "backward": sharding.backward_sums}
    return {
        "shard": {
            "parts": sharding.parts,
            "parameters": f"{sharding.replicated_parameter_bytes} B",
            "activation": f"{sharding.replicated_activation_bytes} B",
            **{
                key: {"count": each.count, "bytes": f"{each.sample_bytes} B"}
                for key, each in sums.items()
                if each.count
            },
            **({"rows": sharding.rows} if sharding.rows else {}),
            **({"fixed": f"{sharding.replicated_fixed_bytes} B"} if sharding.replicated_fixed_bytes else {}),
        }
    }


def _times(table: TimeTable, update_s: float | None) -> dict[str, Any]:
    columns = ("forward", "backward_input", "backward_weight")
    times = {column: [_duration(each) for each in getattr(table, f"{column}_s")] for column in columns}
    update = {} if update_s is None else {"update": _duration(update_s)}
    return {"samples": list(table.samples), **times, **update}


def _duration(seconds: float) -> str:
    return _exact(seconds, {"ms": 1e-3, "s": 1.0}, parse_duration_s)


def _exact(value: float, units: Mapping[str, float], parse: Callable[[object], float]) -> str:
    """Format a value in the first unit in which six digits are exact, else with all its digits in the last unit."""
    for unit, scale in units.items():
        text = f"{value / scale:.6g} {unit}"
        if parse(text) == value:
            return text
    return f"{int(value) if value.is_integer() else value!r} {list(units)[-1]}"


def _take_over(document: Document, new: dict[str, Any], path: Path) -> None:
    """Copy times on other kinds, and the tables of rates, from the old file into the new one of the same layers.

    Of the memory of passes, which may differ between devices, the larger bytes are kept, so that plans fit on both.
    """
    old = document.value
    if not isinstance(old, Mapping) or _without_times(old) != _without_times(new):
        raise _another_model(path)
    _refuse_another_precision(document, _precision(new))
    if "roofline" in old:
        new["roofline"] = old["roofline"]
    if measured := {**old.get("measured_on", {}), **new.get("measured_on", {})}:
        new["measured_on"] = measured
    for before, layer in zip(old["layers"], new["layers"], strict=True):
        if "times" in layer:
            layer["times"] = {**before["times"], **layer["times"]}
        if memory := _larger(before.get("memory"), layer.get("memory")):
            layer["memory"] = memory


def _larger(one: Any, other: Any) -> Any:
    """Return the larger of two byte sizes, in dictionaries for each key; None is no size."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {key: _larger(one.get(key), other.get(key)) for key in {**one, **other}}
    if one is None or other is None:
        return other if one is None else one
    return max(one, other, key=parse_bytes)


def _without_times(document: Mapping[str, Any]) -> Any:
    """Return the document without what was measured, but with whether each layer has times."""
    layers = document.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, Mapping) for layer in layers):
        return None
    blank = [{**layer, "times": isinstance(layer.get("times"), Mapping), "memory": None} for layer in layers]
    head = {key: value for key, value in document.items() if key not in ("measured_on", "precision", "roofline")}
    return {**head, "layers": blank}


def _precision(document: Mapping[str, Any]) -> str | None:
    """Return the precision in which a document's costs were measured; None if no layer has times."""
    is_measured = any(isinstance(layer, Mapping) and "times" in layer for layer in document["layers"])
    return str(document.get("precision") or DEFAULT_PRECISION) if is_measured else None


def _refuse_another_precision(document: Document, precision: str | None) -> None:
    """Raise `InputError` if the costs in a file are not of this precision; None is that of operations and bytes."""
    before = _precision(document.value)
    if (before is None) != (precision is None):
        raise _another_model(document.path)
    if before is None or precision is None:
        return
    find_by_name(before, PRECISIONS, "precision", where=document.where(("precision",)))
    if before != precision:
        raise InputError(
            f"the costs in this file were measured in {before}, but the new ones are of {precision}",
            where=str(document.path),
            valid=f"measure in {before}, choose another file, or remove this one",
        )


def _another_model(path: Path) -> InputError:
    return InputError(
        "there is another model in this file, or one that was built in another way",
        where=str(path),
        valid="choose another file, or remove this one",
    )
