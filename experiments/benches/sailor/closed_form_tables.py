"""The tables of the published closed form: the raw rows of the files, without the importer's corrections.

The importer (planner/files/importers/sailor.py) lowers rows that were measured before warm-up and splits the backward;
the closed form does not. Published plans use measured microbatch sizes only. Assumed for other sizes: times as a
`TimeTable` gives them.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from experiments.benches.sailor.measured_files import Node, SailorNetwork
from planner.files.importers import pick, read_file
from planner.files.importers.sailor import KINDS
from planner.scenario.profile import TimeTable
from traces.common.errors import find_by_name


@dataclass(frozen=True)
class _LayerSizes:
    params_floats: int
    act_output_floats: int
    act_mem_floats: int


# Microbatch -> degree of tensor parallelism -> layer -> [forward s, backward s, update s].
_Rows = dict[int, dict[int, dict[int, tuple[float, float, float]]]]
_Times = dict[str, dict[str, _Rows]]
_Sizes = dict[str, dict[int, dict[int, _LayerSizes]]]

_THEIR_KINDS = {ours: theirs for theirs, ours in KINDS.items()}


class JudgeTables:
    """Times and sizes of one model, and the network of one zone.

    Attributes:
        network: Rates between nodes.
    """

    def __init__(
        self,
        times: Mapping[str, _Rows],
        sizes: Mapping[int, Mapping[int, _LayerSizes]],
        network: SailorNetwork,
        zone: str,
    ) -> None:
        self.network = network
        self._times, self._sizes, self._zone = times, sizes, zone
        # Cached by layers and replica: a plan of hundreds of pipelines needs the same few again and again.
        self._table = cache(self._measured)

    def node(self, kind: str, degree: int) -> Node:
        """Return the files' node for our name of a GPU kind and a degree of tensor parallelism.

        Raises:
            InputError: The files know no such kind.
        """
        return Node(self._zone, find_by_name(kind, _THEIR_KINDS, "GPU kind"), degree)

    def compute_s(self, node: Node, first_layer: int, end_layer: int, samples: int) -> float:
        """Return the seconds of forward and backward of layers ``first_layer`` to ``end_layer - 1``.

        Raises:
            InputError: Nobody measured such a node.
        """
        return self._table(node, first_layer, end_layer).at(samples).total_s

    def update_s(self, node: Node, layer: int, samples: int) -> float:
        """Return the seconds of a layer's update, from the row with the most samples up to ``samples``.

        Raises:
            InputError: Nobody measured such a node.
        """
        rows = self._rows(node)
        measured = max((count for count in rows if count <= samples), default=min(rows))
        return rows[measured][layer][2]

    def parameters(self, degree: int, first_layer: int, end_layer: int) -> int:
        """Return the number of parameters of layers on each device of a replica."""
        sizes = pick(self._sizes, degree, "tensor parallelism", where="layer sizes")
        return sum(sizes[layer].params_floats for layer in range(first_layer, end_layer))

    def activation_values(self, degree: int, first_layer: int, end_layer: int) -> int:
        """Return how many numbers layers save for the backward on each device of a replica, for a sample."""
        sizes = pick(self._sizes, degree, "tensor parallelism", where="layer sizes")
        return sum(sizes[layer].act_mem_floats for layer in range(first_layer, end_layer))

    def output_values(self, layer: int) -> int:
        """Return how many numbers a layer's output has for a sample."""
        return self._sizes[1][layer].act_output_floats

    def _rows(self, node: Node) -> dict[int, dict[int, tuple[float, float, float]]]:
        rows = pick(self._times, node.kind, "GPU kind", where="layer times")
        measured = {samples: row[node.gpus] for samples, row in sorted(rows.items()) if node.gpus in row}
        degrees = {degree: None for row in rows.values() for degree in row}
        pick(degrees, node.gpus, "tensor parallelism", where=f"layer times: {node.kind}")
        return measured

    def _measured(self, node: Node, first_layer: int, end_layer: int) -> TimeTable:
        rows = self._rows(node)
        layers = range(first_layer, end_layer)
        forward_s, backward_s = (
            tuple(sum(row[layer][column] for layer in layers) for row in rows.values()) for column in (0, 1)
        )
        # How the backward's time is split between the two gradients makes no difference here.
        return TimeTable(tuple(rows), forward_s, backward_s, (0.0,) * len(rows))


def read_judge_tables(
    times_path: Path, sizes_path: Path, network_path: Path, model_name: str, zone: str
) -> JudgeTables:
    """Read the tables of the closed form from the files.

    Args:
        times_path: File of layer times, such as ``layer_times.json``.
        sizes_path: File of layer sizes, such as ``layer_sizes.json``.
        network_path: File of rates between nodes, such as ``multizone_bandwidths_het.json``.
        model_name: Name of the model as in the files, ``OPT-350``.
        zone: Name of the zone of all nodes, as in the file of the network.

    Raises:
        InputError: A file is missing or malformed, or has no such model.
    """
    times = pick(read_file(times_path, TypeAdapter(_Times), __name__), model_name, "model", where=str(times_path))
    sizes = pick(read_file(sizes_path, TypeAdapter(_Sizes), __name__), model_name, "model", where=str(sizes_path))
    return JudgeTables(times, sizes, SailorNetwork(network_path), zone)
