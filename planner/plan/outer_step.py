"""The outer step of DiLoCo: settings, the layers of each fragment, and the steps after which fragments are exchanged.

Pipelines train separately from common parameters. A pipeline's *pseudo-gradient* is the difference of the common
parameters and its own. In the outer step every pipeline moves the common parameters by the mean of all
pseudo-gradients, with the same result, and goes on from there. The state of the inner optimizer stays where it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.scenario.training import FLOAT32_BYTES

# Which layers form a fragment: neighbours, or every n-th layer.
PATTERNS = ("sequential", "strided")

# Formats of the values of pseudo-gradients: float32, bfloat16, or integers with one float32 scale for each chunk.
OUTER_COMPRESSIONS = ("none", "bf16", "int8", "int4")

# How pipelines come to the mean of their pseudo-gradients, named after the collective operations.
ALLGATHER, REDUCE_SCATTER = "allgather", "reduce-scatter"
EXCHANGES = (ALLGATHER, REDUCE_SCATTER)

# Most values of a layer that share a scale; with a density below 1, among which the largest ones are chosen.
_DENSE_CHUNK = 256
_SPARSE_CHUNK = 4096
INDEX_BYTES = 2
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class OuterStep:
    """Settings of the outer step, which is SGD with Nesterov momentum.

    With the mean pseudo-gradient Δ, the outer momentum m becomes βm + Δ, and the common parameters θ become
    θ - η(Δ + βm), as in DiLoCo (arXiv 2311.08105). The mean is weighted by samples. With ``diloco-decoupled`` an outer
    step that merges a share of what workers have trained is such a part of one that parts with the same Δ, whose shares
    add up to 1, are together a whole one. Fragments, overlap and mixing are from Streaming DiLoCo (arXiv 2501.18512),
    and need the method ``diloco-streaming`` or ``diloco-decoupled``. Quorum, grace and syncers are from Decoupled
    DiLoCo (arXiv 2604.21428), and need the method ``diloco-decoupled``.

    Attributes:
        learning_rate: Learning rate η, above 0.
        momentum: Nesterov momentum β, from 0 to below 1.
        fragments: Number of groups of layers. Each is exchanged once in ``interval_steps`` steps, one after the other
            at equal distances.
        pattern: With ``sequential`` neighbouring layers form a fragment; with ``strided`` fragment p of n has the
            layers p, p + n, p + 2n and so on.
        overlap_steps: Number of steps between the sending of pseudo-gradients and the outer step, during which
            pipelines go on training; below ``interval_steps``.
        mixing: Share of its own parameters that a pipeline keeps in an outer step, from 0 to below 1: the parameters
            become mixing · own + (1 - mixing) · common. With ``diloco-decoupled``, in one that merges what it has sent.
        compression: Format in which pseudo-gradients are sent, one of `OUTER_COMPRESSIONS`. Streaming DiLoCo sends 4
            bits in another format, E3M0.
        density: Share of the values of each chunk that are sent, those with the largest absolute values, as in
            SparseLoCo (arXiv 2508.15706); above 0, and 1 for all.
        feedback: What compression has left out is multiplied by this factor, from 0 to 1, and added to the next
            pseudo-gradient (error feedback). SparseLoCo has 0.95, and no outer momentum.
        exchange: How n pipelines come to the mean. With ``allgather`` each sends its pseudo-gradients to every other
            one: n - 1 times their bytes. With ``reduce-scatter`` a n-th of every layer belongs to each pipeline, which
            gets that part of all pseudo-gradients, and then sends its mean to all: together 2 (n - 1) / n times the
            bytes, in two messages one after the other. Means are compressed like pseudo-gradients, with error feedback.
            None: the one that usually sends less, ``reduce-scatter`` with more than two pipelines and a density of 1.
        quorum: Number of pipelines whose pseudo-gradients an outer step needs; None for all that are there.
        grace_s: How long an outer step waits for further pseudo-gradients when the quorum is there, seconds; None: as
            long as this delays none of those that are there (`planner.plan.outer_rounds.Rounds`).
        syncers: Names of the devices that take the outer steps and train nothing: fragment p belongs to the one with
            index p modulo their number.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    pattern: str = "sequential"
    overlap_steps: int = 0
    mixing: float = 0.0
    compression: str = "none"
    density: float = 1.0
    feedback: float = 1.0
    exchange: str | None = None
    quorum: int | None = None
    grace_s: float | None = 0.0
    syncers: tuple[str, ...] = ()

    @property
    def is_lossless(self) -> bool:
        """Whether other pipelines receive pseudo-gradients as they are."""
        return self.compression == "none" and self.density == 1

    def chunks(self, elements: int) -> tuple[int, int, int]:
        """Return the number of chunks of a layer, the values of a chunk, and how many of them are sent.

        Chunks are equally large; the last one is filled with zeros.
        """
        if self.density == 1 and self.compression in ("none", "bf16"):
            return 1, elements, elements
        most = _DENSE_CHUNK if self.density == 1 else _SPARSE_CHUNK
        count = -(-elements // most)
        width = -(-elements // count)
        return count, width, max(1, round(self.density * width))

    def packed_bytes(self, elements: int) -> int:
        """Return the bytes of a layer's pseudo-gradient in a message."""
        if not elements:
            return 0
        count, width, kept = self.chunks(elements)
        row_bytes = {
            "none": FLOAT32_BYTES * kept,
            "bf16": 2 * kept,
            "int8": _SCALE_BYTES + kept,
            "int4": _SCALE_BYTES + -(-kept // 2),
        }[self.compression]
        return count * (row_bytes + (INDEX_BYTES * kept if kept < width else 0))

    def parts(self, pipelines: int) -> int:
        """Return in how many parts, each of which one pipeline averages, so many pipelines exchange a layer."""
        exchange = self.exchange or (REDUCE_SCATTER if pipelines > 2 and self.density == 1 else ALLGATHER)
        return pipelines if exchange == REDUCE_SCATTER else 1

    def part_bytes(self, elements: int, part: int | None, parts: int) -> int:
        """Return the bytes of one of so many equal parts of a layer's pseudo-gradient in a message; None for all."""
        if part is None:
            return self.packed_bytes(elements)
        start, end = part_of(elements, part, parts)
        return self.packed_bytes(end - start)

    def fragment_runs(self, layers: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the layers of each fragment of a model with this many layers, as runs (first, end exclusive)."""
        if self.pattern == "strided":
            return tuple(
                tuple((layer, layer + 1) for layer in range(fragment, layers, self.fragments))
                for fragment in range(self.fragments)
            )
        bounds = [fragment * layers // self.fragments for fragment in range(self.fragments + 1)]
        return tuple(((bounds[fragment], bounds[fragment + 1]),) for fragment in range(self.fragments))

    def fragment_layers(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each fragment of a model with this many layers, in rising order."""
        return tuple(tuple(layer for run in runs for layer in range(*run)) for runs in self.fragment_runs(layers))

    def layers_of_syncer(self, device: str, layers: int) -> frozenset[int]:
        """Return the layers of a model with this many layers whose outer steps a device takes."""
        fragments = enumerate(self.fragment_layers(layers))
        return frozenset(layer for index, own in fragments if self.syncer(index) == device for layer in own)

    def syncer(self, fragment: int) -> str:
        """Return the name of the device that takes the outer steps of a fragment."""
        return self.syncers[fragment % len(self.syncers)]


def part_of(elements: int, part: int, parts: int) -> tuple[int, int]:
    """Return the first and the end index (exclusive) of one of ``parts`` equal parts of a layer's parameters.

    >>> [part_of(7, part, 3) for part in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return part * elements // parts, (part + 1) * elements // parts


@dataclass(frozen=True, slots=True)
class FragmentExchanges:
    """The exchanges of one fragment in a part of a run in which their settings stay, numbered from 0.

    Fragment p of n is exchanged first after (p + 1) · interval_steps / n steps, rounded down, and then after every
    further ``interval_steps`` steps. Steps count from the start of training, so that a resumed run, and a part that
    begins with other settings, have the exchanges of a run with these settings from the start. Before the first step of
    a part pipelines take all outer steps that are under way.

    Attributes:
        first_after: Number of steps before the first exchange, from 1 to ``interval_steps``.
        first_step: Number of the part's first step.
        contained_before: Number of the first step whose progress the exchanges of earlier parts do not contain.
    """

    interval_steps: int
    first_after: int
    first_step: int = 0
    contained_before: int = 0

    def before(self, step: int) -> int:
        """Return the number of exchanges that follow the steps before ``step``, of this part."""
        return max(0, self._since_start(step) - self._since_start(self.first_step))

    def follows(self, step: int) -> bool:
        """Return whether an exchange follows a step of training, which may be one before this part."""
        return self._since_start(step + 1) > self._since_start(step)

    def last_step(self, exchange: int) -> int:
        """Return the step that an exchange follows."""
        number = exchange + self._since_start(self.first_step)
        return self.first_after + number * self.interval_steps - 1

    def end_of(self, count: int) -> int:
        """Return the number of the step after those whose progress the first ``count`` exchanges contain."""
        return self.last_step(count - 1) + 1 if count else self.contained_before

    def _since_start(self, step: int) -> int:
        return max(0, (step - self.first_after) // self.interval_steps + 1)


def fragment_exchanges(
    interval_steps: int, outer: OuterStep, first_step: int = 0, earlier: Sequence[FragmentExchanges] = ()
) -> tuple[FragmentExchanges, ...]:
    """Return the exchanges of each fragment in a part of a run.

    Args:
        interval_steps: Number of steps between two exchanges of a fragment: the number of fragments or more.
        outer: Settings of the outer step.
        first_step: Number of the part's first step.
        earlier: The exchanges of each fragment in the part before; none for the first part.
    """
    contained = min((each.end_of(each.before(first_step)) for each in earlier), default=first_step)
    return tuple(
        FragmentExchanges(interval_steps, (number + 1) * interval_steps // outer.fragments, first_step, contained)
        for number in range(outer.fragments)
    )
