"""Model files: what each layer costs on each kind of device, written and read back to add another kind."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from planner.files.documents import Document
from planner.profile import LayerProfile
from planner.scenario import ModelCode
from traces.atomic import write_text_atomically
from traces.errors import InputError


def add_to_model_file(path: Path, name: str, code: ModelCode, layers: Sequence[LayerProfile]) -> None:
    """Write what layers cost; what a file has of other kinds of devices stays.

    Args:
        path: Of the file, YAML; made if there is none.
        name: Of the model.
        code: Where it is.
        layers: With times of the kinds that were measured.

    Raises:
        InputError: The file is of another model, or cannot be written.
    """
    new = _document(path, name, code, layers)
    if path.exists():
        _take_over(Document(path).value, new, path)
    write_text_atomically(path, yaml.safe_dump(new, sort_keys=False, width=120, default_flow_style=None))


def _document(path: Path, name: str, code: ModelCode, layers: Sequence[LayerProfile]) -> dict[str, Any]:
    return {
        "name": name,
        "code": os.path.relpath(code.path.resolve(), path.resolve().parent),
        "arguments": dict(code.arguments),
        "layers": [_layer(layer) for layer in layers],
    }


def _layer(layer: LayerProfile) -> dict[str, Any]:
    columns = ("forward", "backward_input", "backward_weight")
    times = {
        kind: {
            "samples": list(table.samples),
            **{column: [f"{1000 * each:.6g} ms" for each in getattr(table, f"{column}_s")] for column in columns},
        }
        for kind, table in layer.times.items()
    }
    sizes = {"parameters": layer.parameter_bytes, "output": layer.output_bytes, "activation": layer.activation_bytes}
    return {"name": layer.name, **{key: f"{size} B" for key, size in sizes.items()}, "times": times}


def _take_over(old: Any, new: dict[str, Any], path: Path) -> None:
    """Add the times of other kinds from what was in the file, if that is of the same layers."""
    if not isinstance(old, Mapping) or _without_times(old) != _without_times(new):
        raise InputError(
            "there is another model in this file", where=str(path), valid="choose another file, or remove this one"
        )
    for before, layer in zip(old["layers"], new["layers"], strict=True):
        layer["times"] = {**before["times"], **layer["times"]}


def _without_times(document: Mapping[str, Any]) -> Any:
    layers = document.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, Mapping) and "times" in layer for layer in layers):
        return None
    return {**document, "layers": [{key: layer[key] for key in layer if key != "times"} for layer in layers]}
