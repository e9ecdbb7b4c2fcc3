"""One device's part of a checkpoint: a file with the state of some layers before a step, protected by checksums.

The format is safetensors. Tensors have the names ``LAYER.PARAMETER``, and ``LAYER.PARAMETER:NAME`` for what the
optimizer keeps of a parameter (`executor.training.flat_state.named_state`), so that other programs can read them. A
layer's *row* is the bytes of all its tensors. safetensors has no checksums, so the metadata contains a SHA-256 of each
row, and one of the header itself.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from traces.common.atomic import write_bytes_atomically
from traces.common.errors import InputError, RunError

_VERSION = 3


class DamagedError(Exception):
    """The content of a file does not match its checksums, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a part: the file of one device.

    Attributes:
        step: The first step after the checkpoint.
        plan: The plan of step ``step - 1`` as JSON.
        samples_before: Samples of all steps before ``step``.
        model: For each layer a text with the names and shapes of its state and the optimizer
            (`executor.training.flat_state.model_state`): a run can resume only from a checkpoint with equal texts.
        names: Names of the tensors of each layer, in the order of its row.
        digests: SHA-256 of each row in hexadecimal, by layer.
    """

    step: int
    plan: str
    samples_before: int
    model: tuple[str, ...]
    names: Mapping[int, tuple[str, ...]]
    digests: Mapping[int, str]


# The tensors of a layer's state by name, in the order of its row.
LayerTensors = Mapping[str, torch.Tensor]


def write_part(
    path: Path, step: int, plan: str, samples_before: int, model: tuple[str, ...], layers: Mapping[int, LayerTensors]
) -> None:
    """Write a part, a `Header` and the states of layers, atomically; raise `RunError` if it cannot be written."""
    names = {layer: tuple(tensors) for layer, tensors in sorted(layers.items())}
    digests = {layer: _digest(_row(tensors.values())) for layer, tensors in sorted(layers.items())}
    header = Header(step, plan, samples_before, model, names, digests)
    named = {f"{layer}.{name}": each for layer, tensors in layers.items() for name, each in tensors.items()}
    text = json.dumps({"version": _VERSION, **asdict(header)}, sort_keys=True)
    metadata = {"header": text, "seal": hashlib.sha256(text.encode()).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, save(named, metadata))
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
        header = _header(file.metadata(), path)
        row = _row([file.get_tensor(f"{layer}.{name}") for name in header.names[layer]])
    if header.digests[layer] != _digest(row):
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
    names = {int(layer): tuple(own) for layer, own in data["names"].items()}
    return Header(data["step"], data["plan"], data["samples_before"], tuple(data["model"]), names, digests)


def _row(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [each.reshape(-1).view(torch.uint8) for each in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def _digest(row: torch.Tensor) -> str:
    return hashlib.sha256(row.contiguous().numpy().data).hexdigest()
