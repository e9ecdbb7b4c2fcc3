"""The results of a job: the rows of its faults, its gradient norms and its parameters."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.control.policy_driver import PolicyDriver
from executor.core.job import JobFolder
from planner.adapt.gradient_noise import GradientNorms, LocalNorms
from planner.events.event import Event, fault_events
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario

# Bytes of a safetensors file that give the length of its header.
_LENGTH_BYTES = _ALIGNMENT = 8
_PIECE_BYTES = 2**24


def faults_of(scenario: Scenario, driver: PolicyDriver, events: list[Event]) -> list[Event]:
    """Return the rows of a run's faults: the link outages of the scenario, and the absences found in the run."""
    end_s = max(event.end_s for event in events)
    outages = [fault for fault in scenario.faults if isinstance(fault, LinkOutage)]
    return [*fault_events(outages, end_s), *driver.absences.events(end_s)]


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


def merge_parameters(job: JobFolder, ranks: int, target: Path) -> None:
    """Write a safetensors file with the parameters of all layers, each layer from the highest rank that has it.

    Replicas in a pipeline have equal parameters; pipelines that update asynchronously may have different ones. The
    files are copied piece by piece, since the parameters together may be larger than the memory of the launcher.
    """
    found: dict[str, _Tensor] = {}
    # Ranks that were lost, and not replaced, have no file.
    for rank in filter(lambda rank: job.of_rank("parameters", rank).exists(), range(ranks)):
        found.update(_tensors(job.of_rank("parameters", rank)))
    header, end = {}, 0
    for name, tensor in sorted(found.items()):
        header[name] = {**tensor.description, "data_offsets": [end, end + tensor.size_bytes]}
        end += tensor.size_bytes
    text = json.dumps(header).encode()
    # The format asks for data that begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % _ALIGNMENT)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for _, tensor in sorted(found.items()):
            with tensor.path.open("rb") as source:
                source.seek(tensor.start)
                for left in range(tensor.size_bytes, 0, -_PIECE_BYTES):
                    file.write(source.read(min(left, _PIECE_BYTES)))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in a safetensors file: its type and shape as the header has them, and the place of its data."""

    path: Path
    description: dict[str, Any]
    start: int
    size_bytes: int


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
