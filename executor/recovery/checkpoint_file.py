"""One device's part of a checkpoint: the state of some layers before a step, in a file that shows any damage.

It is a safetensors file with a row of bytes for each layer (executor/training/flat_state.py). safetensors has no
checksums: a digest of each row is in the header, and one of the header itself.
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
    """A file is not what was written: says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a part says of itself.

    Attributes:
        step: The first one that has not been done.
        plan: That ``step - 1`` ran, or would have; JSON.
        model: What the state of each layer of the model consists of, and the optimizer: equal where the state of one
            run can be another's.
        digests: SHA-256 of the rows, by the layers that this part has.
    """

    step: int
    plan: str
    model: tuple[str, ...]
    digests: Mapping[int, str]


def write_part(path: Path, step: int, plan: str, model: tuple[str, ...], rows: Mapping[int, torch.Tensor]) -> None:
    """Write a part, with what its `Header` says and the state of each layer: it is there whole or not at all.

    Raises:
        RunError: It cannot be written, to a full disk for example.
    """
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
    return RunError(f"the checkpoint {path}: {reason}; those before it are whole, and '--resume' goes on from there")


def read_header(path: Path) -> Header:
    """Return the header of a part.

    Raises:
        DamagedError: It is not as it was written.
    """
    with _opened(path) as file:
        return _header(file.metadata(), path)


def read_row(path: Path, layer: int) -> torch.Tensor:
    """Return the state of a layer.

    Raises:
        DamagedError: It is not as it was written.
    """
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
