"""The norms of gradients that each rank has noted, as a file of each, and all of them together."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.core.job import JobFolder
from planner.runs.gradient_norms import GradientNorms

# One device alone has nobody to compare with.
_FEWEST_DEVICES = 2


@dataclass(frozen=True, slots=True)
class LocalNorms:
    """One device's part of `GradientNorms`, in squared units of the gradient.

    Attributes:
        step: Index.
        samples: b_i, those that the device took.
        local_squared_norm: |g_i|², of the mean gradient of these samples.
        global_squared_norm: |g|², of the mean gradient of all samples of the step.
    """

    step: int
    samples: int
    local_squared_norm: float
    global_squared_norm: float


def write_norms(norms: Iterable[LocalNorms], job: JobFolder, rank: int) -> None:
    """Write what a rank has noted."""
    job.norms(rank).write_text("".join(json.dumps(asdict(each)) + "\n" for each in norms))


def gather_norms(job: JobFolder, ranks: int) -> tuple[GradientNorms, ...]:
    """Return what all ranks have noted, step by step; nothing where the noise was not measured."""
    by_step: defaultdict[int, list[LocalNorms]] = defaultdict(list)
    for rank in range(ranks):
        for norms in _read(job.norms(rank)):
            by_step[norms.step].append(norms)
    return tuple(_together(step, by_step[step]) for step in sorted(by_step) if len(by_step[step]) >= _FEWEST_DEVICES)


def _read(path: Path) -> Iterator[LocalNorms]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield LocalNorms(**json.loads(line))


def _together(step: int, parts: Sequence[LocalNorms]) -> GradientNorms:
    return GradientNorms(
        step,
        tuple(part.samples for part in parts),
        tuple(part.local_squared_norm for part in parts),
        parts[0].global_squared_norm,
    )
