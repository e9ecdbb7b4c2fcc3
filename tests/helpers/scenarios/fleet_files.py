"""A folder as eth-easl/sailor lays it out, with a fabricated model of four layers on two kinds of nodes."""

import json
from pathlib import Path
from typing import Any

from experiments.benches.planning.planner_fleets import ZONE
from experiments.benches.sailor.measured_files import MeasuredFiles

LAYERS = 4
KINDS = ("A100-40", "V100-16")
# Seconds of forward, and of backward, of each layer for a sample on one GPU; two GPUs take half, and so on.
FORWARD_S = {"A100-40": 0.01, "V100-16": 0.03}
BACKWARD_S = {"A100-40": 0.02, "V100-16": 0.06}
UPDATE_S = {"A100-40": 0.001, "V100-16": 0.003}
PARAMETERS = 10_000_000
OUTPUT_VALUES = 250_000
ACTIVATION_VALUES = 50_000_000


def between_gigabytes_per_s(source: str, target: str, gpus: int) -> float:
    """The rate of any message, which grows with the slower end's GPUs."""
    return gpus * (2.0 if source == target == "A100-40" else 1.0)


def write_fleet_files(folder: Path) -> MeasuredFiles:
    """Write all files but the measured runs, which nobody reads here."""
    times = {kind: {str(count): _rows(kind, count) for count in (1, 2, 4)} for kind in KINDS}
    sizes = {str(degree): {str(layer): _sizes(degree) for layer in range(LAYERS)} for degree in (1, 2, 4)}
    _write(folder / "layer_times.json", {"Toy-1": times})
    _write(folder / "layer_sizes.json", {"Toy-1": sizes})
    network = {kind: {str(gpus): {ZONE: _ends(kind, gpus)} for gpus in (1, 2, 4)} for kind in KINDS}
    _write(folder / "network.json", {ZONE: network})
    inside = {kind: {str(gpus): [[0.0, 0.0, 10.0 * gpus], 1e10 * gpus] for gpus in (2, 4)} for kind in KINDS}
    _write(folder / "intra_node_bandwidths.json", inside)
    runs = folder / "measured-toy-1m"
    runs.mkdir()
    names = ("layer_times.json", "layer_sizes.json", "network.json")
    return MeasuredFiles(runs, *(folder / name for name in names), "Toy-1")


def _rows(kind: str, count: int) -> dict[str, Any]:
    return {
        str(degree): {
            str(layer): [count * FORWARD_S[kind] / degree, count * BACKWARD_S[kind] / degree, UPDATE_S[kind] / degree]
            for layer in range(LAYERS)
        }
        for degree in (1, 2, 4)
    }


def _sizes(degree: int) -> dict[str, int]:
    values = {
        "params": PARAMETERS // degree,
        "act_output": OUTPUT_VALUES,
        "act_mem": ACTIVATION_VALUES // degree,
    }
    return {f"{name}_floats": value for name, value in values.items()} | {
        f"{name}_bytes": 4 * value for name, value in values.items()
    }


def _ends(source: str, gpus: int) -> dict[str, Any]:
    return {
        target: {str(count): _curve(between_gigabytes_per_s(source, target, min(gpus, count))) for count in (1, 2, 4)}
        for target in KINDS
    }


def _curve(gigabytes_per_s: float) -> list[Any]:
    return [[0.0, 0.0, gigabytes_per_s], 1e9 * gigabytes_per_s]


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
