"""When a syncer takes an outer step (diloco-decoupled), with whose pseudo-gradients, and how much each of them counts.

A round of a layer is the time between two of its outer steps. Both backends follow these rules.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from planner.plan.outer_step import OuterStep
from planner.scenario.training import FLOAT32_BYTES

_MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a syncer must know of a worker's pseudo-gradient of a layer beside its values.

    Attributes:
        worker: Index of the worker's pipeline.
        step: The worker's step after which it was sent.
        steps: Number of the worker's steps whose progress it contains.
        base: The version from which the pseudo-gradient leads away.
        sent_s: Run second in which it was sent; minus infinity if this is not known.
        wanted_s: Run second in which an outer step with it should reach the worker, which takes it over
            ``overlap_steps`` further steps after it was sent; minus infinity if this is not known.
    """

    worker: int
    step: int
    steps: int
    base: int
    sent_s: float = -inf
    wanted_s: float = -inf


class Rounds:
    """Decides when a syncer takes the next outer step of a layer, and with whose pseudo-gradients.

    An outer step is due when a quorum of workers is there and the grace is over, or nobody else is awaited. Workers
    that are lost are not awaited, so that without a quorum, which means all, the others are enough; a quorum that is
    given is never lowered. If a worker sends again before the outer step, which it does if its process was replaced
    meanwhile, the later pseudo-gradient counts.

    Without a fixed grace the outer step waits as long as this delays no worker that has sent: until the first of them
    wants it, less the time of the way back. That is the time of the way there, its latency too, times the bytes of a
    parameter as a multiple of those that compression leaves: the more that saves, the shorter is the grace. Decoupled
    DiLoCo has an adaptive window of grace, too; this rule for it is our own.

    Args:
        workers: Number of workers.
        outer: Quorum, grace and format of pseudo-gradients.
        version: Number of the outer steps that have been taken before.

    Attributes:
        version: Number of the outer steps that have been taken.
        due_s: When the next outer step is due; infinity if this is not known.
    """

    def __init__(self, workers: int, outer: OuterStep, version: int = 0) -> None:
        self._quorum, self._grace_s = outer.quorum, outer.grace_s
        # Of a large layer, so that all layers of a message have one grace.
        self._way_back = FLOAT32_BYTES * _MANY / outer.packed_bytes(_MANY)
        self._workers = workers
        self._lost: set[int] = set()
        self._there: dict[int, Contribution] = {}
        # When the first worker that is there would begin to wait for the outer step.
        self._spare_until_s = inf
        self.version = version
        self.due_s = inf

    @property
    def there(self) -> Mapping[int, Contribution]:
        """What has arrived since the last outer step, by worker."""
        return self._there

    def arrive(self, contribution: Contribution, now_s: float) -> None:
        """Count a pseudo-gradient that has arrived at ``now_s``."""
        self._there[contribution.worker] = contribution
        # The clocks of two hosts differ, so that an arrival may seem to precede the send.
        way_back_s = self._way_back * max(0.0, now_s - contribution.sent_s)
        self._spare_until_s = min(self._spare_until_s, contribution.wanted_s - way_back_s)
        self._set_due(now_s)

    def lose(self, worker: int, now_s: float) -> None:
        """Await a worker no longer, whose processes were lost at ``now_s``; what it has sent counts."""
        self._lost.add(worker)
        if self._there:
            self._set_due(now_s)

    def rejoin(self, worker: int) -> None:
        """Await a worker again."""
        self._lost.discard(worker)

    def take(self) -> list[Contribution]:
        """Begin the outer step; return what it merges, by rising worker."""
        found = [self._there[worker] for worker in sorted(self._there)]
        self._there = {}
        self.version += 1
        self.due_s = self._spare_until_s = inf
        return found

    def _set_due(self, now_s: float) -> None:
        awaited = self._workers - len(self._lost | self._there.keys())
        if len(self._there) < (self._quorum or len(self._there) + awaited):
            return
        end_s = self._spare_until_s if self._grace_s is None else now_s + self._grace_s
        self.due_s = min(self.due_s, max(now_s, end_s if awaited else now_s))


def merging_weights(contributions: Iterable[Contribution], samples: Mapping[int, int]) -> list[float]:
    """Return the weights of pseudo-gradients in their mean: by the samples whose progress they contain.

    Args:
        contributions: What the outer step merges.
        samples: Samples of a step of each worker.
    """
    counts = [each.steps * samples[each.worker] for each in contributions]
    total = sum(counts)
    return [count / total for count in counts]


def share_of_workers(merged: Mapping[int, int], earlier: Mapping[int, tuple[int, int]]) -> float:
    """Return the share of an outer step, from above 0 to 1, that its pseudo-gradients amount to.

    While each of the workers that it merges has trained once, others have too, and were merged before: the outer steps
    of them together are as long as one with all of them. If each were as long as that, workers in n groups that meet
    in turn would move the common parameters n times as far as the outer learning rate says.

    Args:
        merged: Samples whose progress the outer step merges, by worker.
        earlier: By worker the version that its last pseudo-gradient before led to, and the samples in that.
    """
    total, share = sum(merged.values()), 0.0
    for worker, own in merged.items():
        since, _ = earlier.get(worker, (0, 0))
        others = (count for other, (version, count) in earlier.items() if other not in merged and version > since)
        share += own / (total + sum(others))
    return share
