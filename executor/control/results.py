"""The results of a job: the rows of its faults, its gradient norms and its parameters."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from executor.control.policy_driver import PolicyDriver
from executor.core.job import JobFolder
from planner.adapt.gradient_noise import GradientNorms, LocalNorms
from planner.events.event import Event, fault_events
from planner.plan.plan import Pipeline
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario

# Bytes of a safetensors file that give the length of its header.
_LENGTH_BYTES = _ALIGNMENT = 8
_PIECE_BYTES = 2**24
# The type of the parameters that pipelines exchange, as safetensors names it. Others are equal in all pipelines.
_EXCHANGED = "F32"


def faults_of(scenario: Scenario, driver: PolicyDriver, events: list[Event]) -> list[Event]:
    """Return the rows of a run's faults: the outages and hangs of the scenario, and the absences found in the run."""
    end_s = max(event.end_s for event in events)
    scheduled = [fault for fault in scenario.faults if not isinstance(fault, Absence)]
    return [*fault_events(scheduled, end_s), *driver.absences.events(end_s)]


def gather_norms(job: JobFolder, ranks: int) -> tuple[GradientNorms, ...]:
    """Return the norms of all ranks by step; empty if they were not measured."""
    by_step: defaultdict[int, list[LocalNorms]] = defaultdict(list)
    for path in filter(lambda path: path.exists(), (job.of_rank("norms", rank) for rank in range(ranks))):
        for line in path.read_text().splitlines():
            norms = LocalNorms(**json.loads(line))
            by_step[norms.step].append(norms)
    found = (GradientNorms.of_devices(parts) for _, parts in sorted(by_step.items()))
    return tuple(norms for norms in found if norms is not None)


def other_devices(job: JobFolder, ranks: int) -> str:
    """Return the names of the devices that trained although they are of other kinds than the scenario gives."""
    paths = filter(Path.exists, (job.of_rank("device", rank) for rank in range(ranks)))
    return ", ".join(dict.fromkeys(path.read_text() for path in paths))


def merge_parameters(
    job: JobFolder, ranks: int, target: Path, separate: Mapping[int, Pipeline] = MappingProxyType({})
) -> None:
    """Write a safetensors file with the parameters of all layers.

    Each layer is from the highest rank that has it. Pipelines that train separately have parameters of their own, of
    which the file has the mean by their samples. The files are read piece by piece, since the parameters together may
    be larger than the memory of the launcher.

    Args:
        job: The job, whose ranks have written their parameters.
        ranks: Number of ranks; ranks that were lost, and not replaced, have no file.
        target: The file to write.
        separate: The pipeline of each rank whose pipeline trains separately.
    """
    found: defaultdict[str, dict[Pipeline | None, _Tensor]] = defaultdict(dict)
    for rank in filter(lambda rank: job.of_rank("parameters", rank).exists(), range(ranks)):
        for name, tensor in _tensors(job.of_rank("parameters", rank)).items():
            found[name][separate.get(rank)] = tensor
    copies = {name: _Copies.of(each) for name, each in sorted(found.items())}
    header, end = {}, 0
    for name, each in copies.items():
        header[name] = {**each.first.description, "data_offsets": [end, end + each.first.size_bytes]}
        end += each.first.size_bytes
    text = json.dumps(header).encode()
    # The format asks for data that begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % _ALIGNMENT)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for each in copies.values():
            file.writelines(each.pieces())


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in a safetensors file: its type and shape as the header has them, and the place of its data."""

    path: Path
    description: dict[str, Any]
    start: int
    size_bytes: int

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """Yield its bytes, so many at a time."""
        with self.path.open("rb") as source:
            source.seek(self.start)
            for left in range(self.size_bytes, 0, -piece_bytes):
                yield source.read(min(left, piece_bytes))


@dataclass(frozen=True, slots=True)
class _Copies:
    """A tensor in the files of pipelines that train separately, or of one rank, with their weights in the mean."""

    tensors: Sequence[_Tensor]
    weights: Sequence[int]

    @classmethod
    def of(cls, found: Mapping[Pipeline | None, _Tensor]) -> "_Copies":
        if None in found:
            # Of a rank that has the common parameters.
            return cls([found[None]], [1])
        return cls(list(found.values()), [pipeline.samples for pipeline in found if pipeline is not None])

    @property
    def first(self) -> _Tensor:
        return self.tensors[0]

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the mean; of equal tensors it is exact."""
        if len(self.tensors) == 1 or self.first.description["dtype"] != _EXCHANGED:
            yield from self.first.pieces(_PIECE_BYTES)
            return
        for same in zip(*(tensor.pieces(_PIECE_BYTES) for tensor in self.tensors), strict=True):
            values = [np.frombuffer(each, np.float32) for each in same]
            yield np.average(values, axis=0, weights=self.weights).astype(np.float32).tobytes()


def _tensors(path: Path) -> dict[str, _Tensor]:
    """Return the tensors of a safetensors file by name; its header is read only."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            description = {"dtype": entry["dtype"], "shape": entry["shape"]}
            found[name] = _Tensor(path, description, _LENGTH_BYTES + length + start, end - start)
    return found
