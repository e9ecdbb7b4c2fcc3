"""The rules of the method ``diloco-decoupled`` for both backends: when layers are sent, merged and taken over.

A worker is a pipeline. Its steps are counted from the start of training, and differ from those of other workers. For
each layer a *syncer* holds the common parameters. It counts its outer steps, whose number is the *version* of the
common parameters; version 0 is the start.

A layer's pseudo-gradient is the version that the worker has taken over last, minus its own parameters. The worker sends
the layers of a fragment after the steps that `FragmentExchanges` gives, except those whose last pseudo-gradient is not
yet in a version that it has taken over: their next one then contains the progress since.

When it takes over a version with the pseudo-gradient that it sent last, a worker mixes its parameters with the common
ones, as in Streaming DiLoCo. A version that comes while none is under way moves its parameters as far as the common
ones have moved, so that nothing is lost of the progress that it has not sent. That rule and `share_of_workers`
(planner/plan/outer_rounds.py) are our own: with outer steps of some workers in turn, full steps and mixing let the
common parameters swing up.

A worker whose process was replaced takes over the present common parameters, and the state of the inner optimizer of
another worker: with an empty one, the first steps of AdamW are too long, and spoil the common parameters.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner.plan.outer_rounds import Contribution
from planner.plan.outer_step import OuterStep, fragment_exchanges

# Number of steps that a worker may begin beyond those that it has finished; one would make it wait for an answer.
LEAD_STEPS = 2


@dataclass(slots=True)
class _Layer:
    """The state of a layer on a worker.

    Attributes:
        fragment: The layer's fragment.
        counted: Number of the worker's steps whose progress has been sent, or was there when it joined.
        base: The version that the worker has taken over last.
        sent: The step after which the pseudo-gradient was sent that no version taken over contains; None if none.
        arrived: The newest version that has arrived and is not taken over; None if there is none.
        answers: Whether ``arrived`` contains the pseudo-gradient that was sent last.
    """

    fragment: int
    counted: int
    base: int = 0
    sent: int | None = None
    arrived: int | None = None
    answers: bool = False

    def lets_take_over(self, step: int, overlap_steps: int) -> bool:
        """Return whether what has arrived may be taken over before a step: the answer, not too early, if one is due."""
        return self.sent is None or (self.answers and step > self.sent + overlap_steps)


class WorkerLayers:
    """Decides what a device of a worker sends after its steps, and which versions it takes over before them.

    Args:
        interval_steps: Steps between two exchanges of a fragment.
        layers: The fragment of each layer that the device exchanges, by layer.
        step: The worker's first step: 0, or that at which it joins or resumes.
        restored: What `state` has returned in an earlier run.
    """

    def __init__(
        self,
        worker: int,
        interval_steps: int,
        outer: OuterStep,
        layers: Mapping[int, int],
        step: int = 0,
        restored: Mapping[int, tuple[int, int, int]] = MappingProxyType({}),
    ) -> None:
        self._worker = worker
        self._overlap_steps = outer.overlap_steps
        self._exchanges = fragment_exchanges(interval_steps, outer)
        self._layers = {layer: _Layer(fragment, step) for layer, fragment in sorted(layers.items())}
        # The step after which the device sent last, or the first one whose end is known, and the second of its end.
        self._timed_from: tuple[int, float] | None = None
        for layer, (counted, base, sent) in restored.items():
            self._layers[layer] = _Layer(layers[layer], counted, base, None if sent < 0 else sent)

    def state(self, layer: int) -> tuple[int, int, int]:
        """Return what a later run must know of a layer; a version that is not taken over will be sent again.

        These are the number of the worker's steps whose progress was sent, the version taken over last, and the step
        after which the pseudo-gradient was sent that no such version contains, -1 if none.
        """
        own = self._layers[layer]
        return own.counted, own.base, -1 if own.sent is None else own.sent

    def send(self, step: int, now_s: float) -> dict[int, Contribution]:
        """Return the layers whose pseudo-gradients are sent after a step that ended at ``now_s``, as if they now were.

        To be called after every step, since the worker's speed is the mean of its steps since it sent last.
        """
        found = {}
        wanted_s = self._wanted_s(step, now_s)
        for layer, own in self._layers.items():
            if own.sent is None and self._exchanges[own.fragment].follows(step):
                found[layer] = Contribution(self._worker, step, step + 1 - own.counted, own.base, now_s, wanted_s)
                own.sent, own.counted = step, step + 1
        if found or self._timed_from is None:
            self._timed_from = step, now_s
        return found

    def _wanted_s(self, step: int, now_s: float) -> float:
        """Return when an answer to what is sent now should arrive: a step before its time, since speeds vary."""
        if self._timed_from is None:
            return now_s
        from_step, from_s = self._timed_from
        return now_s + max(0, self._overlap_steps - 1) * (now_s - from_s) / (step - from_step)

    def arrive(self, layer: int, version: int, merged_step: int) -> None:
        """Note that a version of a layer has arrived.

        ``merged_step`` is the last step after which this worker sent a pseudo-gradient that is in this version, or in
        one before; -1 if there is none.
        """
        own = self._layers[layer]
        if own.arrived is not None and version <= own.arrived:
            return
        own.arrived = version
        own.answers = own.sent is not None and merged_step >= own.sent

    def take_over(self, step: int | None) -> dict[int, bool]:
        """Return the layers whose newest version the device takes over before a step, as if it now did.

        The values say whether the version contains the pseudo-gradient that it has sent last.

        While a pseudo-gradient is under way, only a version that contains it is taken over: as many steps after it was
        sent as Streaming DiLoCo would, or as soon as it is there. Otherwise any version is, as soon as it is there.
        With None, at the end of the run, every version is taken over.
        """
        found = {}
        for layer, own in self._layers.items():
            if own.arrived is None:
                continue
            if step is not None and not own.lets_take_over(step, self._overlap_steps):
                continue
            found[layer] = own.answers
            own.base, own.arrived = own.arrived, None
            if own.answers:
                own.sent, own.answers = None, False
        return found

    def join(self, step: int) -> None:
        """Begin anew with a step, since the worker's process was replaced: the newest versions are to come."""
        self._layers = {layer: _Layer(own.fragment, step, own.base) for layer, own in self._layers.items()}
        self._timed_from = None


class StateRequests:
    """Decides which worker gives its optimizer's state of layers to a worker that joins; the syncer passes it on.

    A request is answered at the end of the giver's next step. If the giver is lost before, another one is asked. A
    worker that has joined gives nothing until it has sent a pseudo-gradient: so nobody awaits one that waits itself.

    Args:
        workers: Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # The giver of each layer that a worker awaits, by worker.
        self._givers: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._joined: set[int] = set()

    def note_sent(self, worker: int) -> None:
        """Note that a worker has sent a pseudo-gradient."""
        self._joined.discard(worker)

    def ask(self, worker: int, layers: Iterable[int], able: Collection[int]) -> int | None:
        """Return the worker that gives ``worker``, which joins, the state of layers; None if it must do without.

        Args:
            worker: Index of the worker that joins.
            layers: Indices of the layers.
            able: Workers that are there and have steps left, so that they can give what they have.
        """
        self._joined.add(worker)
        others = set(able) - self._joined
        # The next one, so that workers which join at the same time ask different ones.
        giver = min(others, key=lambda other: (other - worker) % self._workers, default=None)
        for layer in layers:
            if giver is not None:
                self._givers[worker][layer] = giver
            else:
                self._givers[worker].pop(layer, None)
        return giver

    def forget(self, worker: int, layers: Collection[int]) -> None:
        """Forget that a worker awaits the state of layers."""
        for layer in layers:
            self._givers[worker].pop(layer, None)

    def owed_by(self, giver: int, layers: Collection[int]) -> dict[int, list[int]]:
        """Return, by worker, the layers of these whose state a worker was asked for and has not given."""
        found = {
            other: [layer for layer, by in own.items() if by == giver and layer in layers]
            for other, own in self._givers.items()
        }
        return {other: owed for other, owed in found.items() if owed}

    def answer(self, worker: int, layers: Iterable[int]) -> list[int]:
        """Note that the state of layers goes to a worker; return those that it awaited."""
        return [layer for layer in layers if self._givers[worker].pop(layer, None) is not None]
