"""Networks as eth-easl/sailor publishes them: JSON files of bandwidth by message size.

    between nodes: zone -> GPU kind -> GPUs that send -> zone -> GPU kind -> GPUs that receive -> curve
    inside nodes:  GPU kind -> GPUs of the node -> curve
    curve:         [[a, b, c], ceiling in bytes per second], see planner.scenario.size_curve

A curve for several GPUs to a node is what all of them together get.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from planner.files.importers import Value, pick, read_file
from planner.scenario.size_curve import SizeCurve

_Curve = tuple[tuple[float, float, float], float]
_Ends = dict[str, dict[str, dict[int, _Curve]]]
_Between = dict[str, dict[str, dict[int, _Ends]]]
_Inside = dict[str, dict[int, _Curve]]


@dataclass(frozen=True, slots=True)
class Node:
    """One end of a measurement: GPUs of one machine that send or receive at once.

    Attributes:
        zone: As in the file, ``us-central1-a``.
        kind: As in the file, ``GH-96``.
        gpus: Number of its GPUs.
    """

    zone: str
    kind: str
    gpus: int


class SailorNetwork:
    """The measured rates between nodes.

    Raises:
        InputError: The file is missing or malformed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._between: Mapping[str, Mapping[str, Mapping[int, _Ends]]] = read_file(
            path, TypeAdapter(_Between), __name__
        )

    def curve(self, source: Node, target: Node) -> SizeCurve:
        """Return the rate from one node to another, of all GPUs together.

        Raises:
            InputError: Nobody measured between such nodes.
        """
        ends = _find(self._between, source, str(self._path))
        where = f"{self._path}: {source.zone}.{source.kind}.{source.gpus}"
        return _curve(_find(ends, target, where))


def read_inside(path: Path) -> dict[tuple[str, int], SizeCurve]:
    """Return the rates inside nodes, by GPU kind as in the file and number of GPUs.

    Raises:
        InputError: The file is missing or malformed.
    """
    inside = read_file(path, TypeAdapter(_Inside), __name__)
    return {(kind, gpus): _curve(curve) for kind, sizes in inside.items() for gpus, curve in sizes.items()}


def _find(zones: Mapping[str, Mapping[str, Mapping[int, Value]]], node: Node, where: str) -> Value:
    kinds = pick(zones, node.zone, "zone", where=where)
    counts = pick(kinds, node.kind, "GPU kind", where=f"{where}: {node.zone}")
    return pick(counts, node.gpus, "number of GPUs", where=f"{where}: {node.zone}.{node.kind}")


def _curve(measured: _Curve) -> SizeCurve:
    polynomial, ceiling_bytes_per_s = measured
    return SizeCurve(*polynomial, 8 * ceiling_bytes_per_s)
