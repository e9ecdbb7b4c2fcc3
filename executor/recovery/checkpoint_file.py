"""One device's part of a checkpoint: a file with the state of some layers before a step, protected by checksums.

The format is safetensors, with a row of bytes for each layer (executor/training/flat_state.py). safetensors has no
checksums, so the metadata contains a SHA-256 of each row, and one of the header itself.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from traces.common.atomic import write_bytes_atomically
from traces.common.errors import InputError, RunError

_VERSION = 1


class DamagedError(Exception):
    """The content of a file does not match its checksums, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a part: the file of one device.

    Attributes:
        step: The first step after the checkpoint.
        plan: The plan of step ``step - 1`` as JSON.
        model: For each layer a text with the names and shapes of its state and the optimizer
            (`executor.training.flat_state.model_state`): a run can resume only from a checkpoint with equal texts.
        digests: SHA-256 of each row in hexadecimal, by layer.
    """

    step: int
    plan: str
    model: tuple[str, ...]
    digests: Mapping[int, str]


def write_part(path: Path, step: int, plan: str, model: tuple[str, ...], rows: Mapping[int, torch.Tensor]) -> None:
    """Write a part, a `Header` and the states of layers, atomically; raise `RunError` if it cannot be written."""
    header = Header(step, plan, model, {layer: _digest(row) for layer, row in sorted(rows.items())})
    text = json.dumps({"version": _VERSION, **asdict(header)}, sort_keys=True)
    metadata = {"header": text, "seal": hashlib.sha256(text.encode()).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, save({f"layer-{layer}": row for layer, row in rows.items()}, metadata))
    except OSError as error:
        raise _unwritable(path, error.strerror or "") from error
    except InputError as error:
        raise _unwritable(path, error.problem) from error


def _unwritable(path: Path, reason: str) -> RunError:
    return RunError(
        f"checkpoint {path}: cannot be written: {reason}; earlier checkpoints are complete, and '--resume' uses them"
    )


def read_header(path: Path) -> Header:
    """Return the header of a part; raise `DamagedError` if the header cannot be read or its checksum is wrong."""
    with _opened(path) as file:
        return _header(file.metadata(), path)


def read_row(path: Path, layer: int) -> torch.Tensor:
    """Return a layer's state, a one-dimensional uint8 tensor; raise `DamagedError` if a checksum is wrong."""
    with _opened(path) as file:
        expected = _header(file.metadata(), path).digests.get(layer)
        row: torch.Tensor = file.get_tensor(f"layer-{layer}")
    if expected != _digest(row):
        raise DamagedError(f"{path}: the bytes of layer {layer} are not those that were written")
    return row


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error


def _header(metadata: Mapping[str, str] | None, path: Path) -> Header:
    text = (metadata or {}).get("header", "")
    if (metadata or {}).get("seal") != hashlib.sha256(text.encode()).hexdigest():
        raise DamagedError(f"{path}: its header is not the one that was written")
    data = json.loads(text)
    if data.pop("version") != _VERSION:
        raise DamagedError(f"{path} was written by another version of ropebridge")
    digests = {int(layer): digest for layer, digest in data["digests"].items()}
    return Header(data["step"], data["plan"], tuple(data["model"]), digests)


def _digest(row: torch.Tensor) -> str:
    return hashlib.sha256(row.contiguous().numpy().data).hexdigest()
