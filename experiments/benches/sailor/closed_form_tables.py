"""The measured times and sizes of layers from which Sailor's closed form computes iteration times.

The rows of the files are used as they are. The importer (planner/files/importers/sailor.py) lowers rows that were
measured before warm-up and splits the backward; the closed form does not. Assumed for microbatch sizes that were not
measured: times as a `TimeTable` gives them.
"""

from collections.abc import Mapping
from functools import cache

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from experiments.benches.sailor.measured_files import MeasuredFiles, Node, SailorNetwork
from planner.files.importers import pick, read_file
from planner.files.importers.sailor import KINDS
from planner.scenario.profile import TimeTable
from traces.common.errors import find_by_name


@dataclass(frozen=True)
class _LayerSizes:
    params_floats: int
    act_output_floats: int
    act_mem_floats: int


# Maps microbatch size, degree of tensor parallelism and layer to the seconds of forward, backward and update.
_Rows = dict[int, dict[int, dict[int, tuple[float, float, float]]]]
_Times = dict[str, dict[str, _Rows]]
_Sizes = dict[str, dict[int, dict[int, _LayerSizes]]]

_THEIR_KINDS = {ours: theirs for theirs, ours in KINDS.items()}


class JudgeTables:
    """The measured layer times and sizes of one model, and the rates between nodes (``network``)."""

    def __init__(
        self,
        times: Mapping[str, _Rows],
        sizes: Mapping[int, Mapping[int, _LayerSizes]],
        network: SailorNetwork,
        zone: str,
    ) -> None:
        self.network = network
        self._times, self._sizes, self._zone = times, sizes, zone
        # Cached, since the hundreds of pipelines of a plan need the same few tables.
        self._table = cache(self._measured)

    def node(self, kind: str, degree: int) -> Node:
        """Return a node as the files name it, for ropebridge's name of a GPU kind and a degree of tensor parallelism.

        Raises:
            InputError: The files have no such kind.
        """
        return Node(self._zone, find_by_name(kind, _THEIR_KINDS, "GPU kind"), degree)

    def compute_s(self, node: Node, first_layer: int, end_layer: int, samples: int) -> float:
        """Return the seconds of forward and backward of layers ``first_layer`` to ``end_layer - 1``.

        Raises:
            InputError: There is no measurement of such a node.
        """
        return self._table(node, first_layer, end_layer).at(samples).total_s

    def update_s(self, node: Node, layer: int, samples: int) -> float:
        """Return the seconds of a layer's update, measured at the largest microbatch size up to ``samples``.

        Raises:
            InputError: There is no measurement of such a node.
        """
        rows = self._rows(node)
        measured = max((count for count in rows if count <= samples), default=min(rows))
        return rows[measured][layer][2]

    def parameters(self, degree: int, first_layer: int, end_layer: int) -> int:
        """Return the number of parameters of layers on each of the ``degree`` devices that share the layers."""
        sizes = pick(self._sizes, degree, "tensor parallelism", where="layer sizes")
        return sum(sizes[layer].params_floats for layer in range(first_layer, end_layer))

    def activation_values(self, degree: int, first_layer: int, end_layer: int) -> int:
        """Return how many numbers layers save for the backward, for a sample, on each of ``degree`` devices."""
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
        # A TimeTable splits the backward into two gradients. Only their sum is used, so the second one is 0 here.
        return TimeTable(tuple(rows), forward_s, backward_s, (0.0,) * len(rows))


def read_judge_tables(files: MeasuredFiles, zone: str) -> JudgeTables:
    """Read the tables of the closed form; ``zone`` is the name of all nodes' zone in the file of the network.

    Raises:
        InputError: A file is missing or malformed, or has no such model.
    """
    model = files.model_name
    times = pick(read_file(files.times, TypeAdapter(_Times), __name__), model, "model", where=str(files.times))
    sizes = pick(read_file(files.sizes, TypeAdapter(_Sizes), __name__), model, "model", where=str(files.sizes))
    return JudgeTables(times, sizes, SailorNetwork(files.network), zone)
