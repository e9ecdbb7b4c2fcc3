"""One device's part of a checkpoint: a file with the state of some layers before a step, protected by checksums.

The format is safetensors. Tensors have the names ``LAYER.PARAMETER``, and ``LAYER.PARAMETER:NAME`` for what the
optimizer keeps of a parameter (`executor.training.flat_state.named_state`), so that other programs can read them. Each
device of a tensor-parallel group has a file with its parts of the sharded tensors, and the first one also has the
tensors that are not sharded. Pipelines that meet in outer steps add ``LAYER.outer:NAME``
(executor/runtime/outer/state.py). safetensors has no checksums, so the metadata contains a SHA-256 of the bytes of each
layer, and one of the header itself.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from traces.common.atomic import write_bytes_atomically
from traces.common.errors import InputError, RunError

_VERSION = 4

# Prefix of the names of tensors that belong to the outer step.
_OUTER = "outer:"


class DamagedError(Exception):
    """The content of a file does not match its checksums, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a device has of its layers: all, or as a member of a tensor-parallel group its parts of sharded tensors.

    Attributes:
        index: The device's place in the group; the first device's file also has the tensors that are not sharded.
        count: Number of devices of the group.
        dimensions: For each layer the dimension along which a tensor is sharded, by the tensor's name.
    """

    index: int = 0
    count: int = 1
    dimensions: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a part: the file of one device.

    Attributes:
        step: The first step after the checkpoint.
        plan: The plan of step ``step - 1`` as JSON.
        samples_before: Samples of all steps before ``step``.
        model: For each layer a text with the names and shapes of its state and the optimizer
            (`executor.training.flat_state.model_state`): a run can resume only from a checkpoint with equal texts.
        names: Names of the tensors of each layer, in the order in which `digests` takes their bytes.
        digests: SHA-256 of the bytes of each layer in hexadecimal, by layer.
        share: What the device has of its layers.
        pipelines: Number of pipelines whose states are in checkpoints of their own; 1 if one state is that of all.
    """

    step: int
    plan: str
    samples_before: int
    model: tuple[str, ...]
    names: Mapping[int, tuple[str, ...]]
    digests: Mapping[int, str]
    share: Share = WHOLE
    pipelines: int = 1

    @property
    def has_state(self) -> bool:
        """Whether the part has more than the state of the outer step."""
        return any(not name.startswith(_OUTER) for names in self.names.values() for name in names)


# The tensors of a layer's state by name.
LayerTensors = Mapping[str, torch.Tensor]


def with_outer(state: LayerTensors, outer: LayerTensors) -> LayerTensors:
    """Return the tensors of a layer's state, followed by those of the outer step."""
    return {**state, **{f"{_OUTER}{name}": each for name, each in outer.items()}}


def split_outer(state: LayerTensors) -> tuple[LayerTensors, LayerTensors]:
    """Return the two arguments of `with_outer` from its result."""
    outer = {name.removeprefix(_OUTER): each for name, each in state.items() if name.startswith(_OUTER)}
    return {name: each for name, each in state.items() if not name.startswith(_OUTER)}, outer


@dataclass(frozen=True, slots=True)
class Part:
    """What one device writes of a checkpoint: the states of some layers, and what its `Header` says of them."""

    step: int
    plan: str
    samples_before: int
    model: tuple[str, ...]
    layers: Mapping[int, LayerTensors]
    share: Share = WHOLE
    pipelines: int = 1

    @property
    def header(self) -> Header:
        """The header, with the checksums of the layers."""
        names = {layer: tuple(tensors) for layer, tensors in sorted(self.layers.items())}
        digests = {layer: _digest(tensors.values()) for layer, tensors in sorted(self.layers.items())}
        own = (self.step, self.plan, self.samples_before, self.model)
        return Header(*own, names, digests, self.share, self.pipelines)


def write_part(path: Path, part: Part) -> None:
    """Write a part atomically; raise `RunError` if it cannot be written."""
    named = {f"{layer}.{name}": each for layer, tensors in part.layers.items() for name, each in tensors.items()}
    text = json.dumps({"version": _VERSION, **asdict(part.header)}, sort_keys=True)
    metadata = {"header": text, "seal": hashlib.sha256(text.encode()).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, save(named, metadata))
    except OSError as error:
        raise _unwritable(path, error.strerror or "") from error
    except InputError as error:
        raise _unwritable(path, error.problem) from error
    except RunError as error:
        raise RunError(f"checkpoint {error}; earlier checkpoints are complete, and '--resume' uses them") from error


def _unwritable(path: Path, reason: str) -> RunError:
    return RunError(
        f"checkpoint {path}: cannot be written: {reason}; earlier checkpoints are complete, and '--resume' uses them"
    )


def read_header(path: Path) -> Header:
    """Return the header of a part; raise `DamagedError` if the header cannot be read or its checksum is wrong."""
    with _opened(path) as file:
        return _header(file.metadata(), path)


def files_by_layer(headers: Mapping[Path, Header]) -> dict[int, list[Path]]:
    """Return, for each layer that some of the parts contain completely, their files in the order of the group."""
    found: dict[tuple[int, int], dict[int, Path]] = defaultdict(dict)
    for path, header in headers.items():
        for layer in header.digests:
            found[layer, header.share.count][header.share.index] = path
    return {
        layer: [files[index] for index in range(count)]
        for (layer, count), files in found.items()
        if len(files) == count
    }


def read_layer(files: Sequence[Path], layer: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, whole, from the files of `files_by_layer`.

    Raises:
        DamagedError: A file cannot be read, or a checksum is wrong.
    """
    first, *others = [_read_tensors(path, layer) for path in files]
    if not others:
        return first
    dimensions = read_header(files[0]).share.dimensions.get(layer, {})
    return {
        name: torch.cat([tensor, *(other[name] for other in others)], dimensions[name])
        if name in dimensions
        else tensor
        for name, tensor in first.items()
    }


def _read_tensors(path: Path, layer: int) -> dict[str, torch.Tensor]:
    with _opened(path) as file:
        header = _header(file.metadata(), path)
        tensors = {name: file.get_tensor(f"{layer}.{name}") for name in header.names[layer]}
    if header.digests[layer] != _digest(tensors.values()):
        raise DamagedError(f"{path}: the bytes of layer {layer} are not those that were written")
    return tensors


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
    share = Share(**data["share"])
    share = replace(share, dimensions={int(layer): own for layer, own in share.dimensions.items()})
    own = (data["step"], data["plan"], data["samples_before"], tuple(data["model"]), names, digests)
    return Header(*own, share, data["pipelines"])


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(each.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
