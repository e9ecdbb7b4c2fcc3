"""Finds the files of published measurements, which are not part of ropebridge, and reads the rates of the network."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from planner.files.importers import Value, pick, read_file
from planner.files.importers.sailor import profiled_models
from planner.scenario.size_curve import SizeCurve
from traces.common.errors import InputError

_Curve = tuple[tuple[float, float, float], float]
_Ends = dict[str, dict[str, dict[int, _Curve]]]
_Between = dict[str, dict[str, dict[int, _Ends]]]
_Inside = dict[str, dict[int, _Curve]]


@dataclass(frozen=True, slots=True)
class Node:
    """GPUs of one machine that send or receive together; zone and kind are as in the files, such as ``GH-96``."""

    zone: str
    kind: str
    gpus: int


class SailorNetwork:
    """The measured rates between nodes, read from a file; raises InputError if the file is missing or malformed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._between: Mapping[str, Mapping[str, Mapping[int, _Ends]]] = read_file(
            path, TypeAdapter(_Between), __name__
        )

    def curve(self, source: Node, target: Node) -> SizeCurve:
        """Return the rate by message size from one node to another, with all their GPUs sending at once.

        Raises:
            InputError: There is no measurement between such nodes.
        """
        ends = _find(self._between, source, str(self._path))
        where = f"{self._path}: {source.zone}.{source.kind}.{source.gpus}"
        return _curve(_find(ends, target, where))


def read_inside(path: Path) -> dict[tuple[str, int], SizeCurve]:
    """Return the rates inside nodes, by GPU kind as in the file and number of GPUs."""
    inside = read_file(path, TypeAdapter(_Inside), __name__)
    return {(kind, gpus): _curve(curve) for kind, sizes in inside.items() for gpus, curve in sizes.items()}


def _find(zones: Mapping[str, Mapping[str, Mapping[int, Value]]], node: Node, where: str) -> Value:
    kinds = pick(zones, node.zone, "zone", where=where)
    counts = pick(kinds, node.kind, "GPU kind", where=f"{where}: {node.zone}")
    return pick(counts, node.gpus, "number of GPUs", where=f"{where}: {node.zone}.{node.kind}")


def _curve(measured: _Curve) -> SizeCurve:
    polynomial, ceiling_bytes_per_s = measured
    return SizeCurve(*polynomial, 8 * ceiling_bytes_per_s)


# Environment variable with the folder of the measurements: layer_times.json, layer_sizes.json, providers/, measured-*/.
VARIABLE = "ROPEBRIDGE_MEASURED"


@dataclass(frozen=True, slots=True)
class MeasuredFiles:
    """The files of measured runs, layer times, layer sizes and rates between nodes, in the formats of eth-easl/sailor.

    Attributes:
        runs: Folder of runs, see `experiments.benches.sailor.runs`.
        model_name: Name of the model that the runs trained, as in ``times``.
    """

    runs: Path
    times: Path
    sizes: Path
    network: Path
    model_name: str


def find_measured_files(
    runs: Path | None = None,
    times: Path | None = None,
    sizes: Path | None = None,
    network: Path | None = None,
    model_name: str = "",
) -> MeasuredFiles:
    """Return the given files, completed from the folder that the environment variable `VARIABLE` names.

    If the model's name is not given, it is part of the runs' folder name: OPT-350 of ``measured-opt-350m-gh200``.

    Raises:
        InputError: There is no such folder or no folder of runs in it, or the model's name is neither given nor found.
    """
    if runs is None or times is None or sizes is None or network is None:
        folder = _folder()
        runs = runs or _only_runs(folder)
        times = times or folder / "layer_times.json"
        sizes = sizes or folder / "layer_sizes.json"
        network = network or folder / "providers" / "multizone_bandwidths_het.json"
    if not runs.is_dir():
        raise InputError("there is no such folder", where=str(runs), valid="give a folder of measured runs")
    return MeasuredFiles(runs, times, sizes, network, model_name or _model_of(runs, times))


def _folder() -> Path:
    given = os.environ.get(VARIABLE)
    if not given or not Path(given).is_dir():
        raise InputError(
            "there are no measured runs",
            where=f"{VARIABLE}={given}" if given else f"{VARIABLE} is not set",
            valid=f"give --runs, --times, --sizes and --network, or a folder in the environment variable {VARIABLE}",
        )
    return Path(given)


def _only_runs(folder: Path) -> Path:
    found = sorted(path for path in folder.glob("measured-*") if path.is_dir())
    if len(found) != 1:
        raise InputError(
            f"there are {len(found)} folders 'measured-*'", where=str(folder), valid="choose one with --runs"
        )
    return found[0]


def _model_of(runs: Path, times: Path) -> str:
    names = profiled_models(times)
    named = [name for name in names if name.lower() in runs.resolve().name.lower()]
    if len(named) != 1:
        raise InputError(
            f"the name of folder '{runs.resolve().name}' does not contain the name of the model",
            where=str(runs),
            valid=f"give --model with one of {', '.join(names)}",
        )
    return named[0]
