"""Trials drawn at random: a training, and one to three strikes at instants from the launch to the end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from experiments.benches.faults.case import PLACES, POLICIES, SHAPES, Case

KILL, STOP, CUT, FULL_DISK = "kill", "stop", "cut", "full disk"
LAUNCHER, AGENT, RELAY, LINKS, DISK = "launcher", "agent", "relay", "links", "disk"

# How often each kind is drawn; and the seconds that a stop and a cut last.
_KINDS = {KILL: 45, STOP: 30, CUT: 15, FULL_DISK: 10}
_LASTS_S = {STOP: (1.0, 10.0), CUT: (3.0, 30.0)}
# Longest time until a killed host is started again, as its supervisor would do.
_BACK_S = 2.0

_RANK_SHARE, _AT_ONCE_SHARE = 0.7, 0.5


@dataclass(frozen=True, slots=True)
class Strike:
    """A strike to a process of a run, to its links or to its disk.

    Attributes:
        kind: `KILL`, `STOP`, `CUT` or `FULL_DISK`.
        target: ``rank N``, `LAUNCHER`, `AGENT`, `RELAY`, the name of another host than the head, `LINKS` or `DISK`.
        at: When, as a share of the time that the run takes undisturbed, from the launch on.
        lasts_s: How long a stop or a cut lasts; the time until a killed host is started again, seconds.
    """

    kind: str
    target: str
    at: float
    lasts_s: float

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.kind in _LASTS_S else ""
        return f"{self.kind} {self.target} at {self.at:.2f}{lasts}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A training and the strikes to it; ``number`` is the seed that it is drawn from."""

    number: int
    case: Case
    strikes: tuple[Strike, ...]


def draw(number: int, wheres: Sequence[str]) -> Trial:
    """Return the trial of a seed; ``wheres`` are the kinds of place that this machine can have, as in `Case.where`."""
    chance = Random(f"faults-{number}")
    where, shape = chance.choice(wheres), chance.choice(list(SHAPES))
    # Asteroid's replay plans single pipelines. What it changes to after a loss depends on the instant, and a repeated
    # step is computed once with each plan: AdamW would make the difference of their rounding large.
    policy = chance.choice(POLICIES[:2] if shape == "pipelines" else POLICIES)
    optimizer = "momentum" if policy == "asteroid-replay" else chance.choice(["momentum", "adamw"])
    case = Case(shape, policy, optimizer, where, chance.choice(list(PLACES)))
    strikes = [_strike(chance, case) for _ in range(chance.choice([1, 1, 1, 2, 2, 3]))]
    return Trial(number, case, tuple(_at(each, strikes[0].at, chance) for each in strikes))


def _at(strike: Strike, first: float, chance: Random) -> Strike:
    at_once = chance.random() < _AT_ONCE_SHARE
    return Strike(strike.kind, strike.target, first if at_once else strike.at, strike.lasts_s)


def _strike(chance: Random, case: Case) -> Strike:
    # Messages that the shaper holds back have no links that could be cut.
    kinds = {kind: weight for kind, weight in _KINDS.items() if kind != CUT or case.where != "shaper"}
    (kind,) = chance.choices(list(kinds), list(kinds.values()))
    targets = {CUT: LINKS, FULL_DISK: DISK}
    target = targets.get(kind) or _target(chance, case)
    if kind in _LASTS_S:
        least_s, most_s = _LASTS_S[kind]
        lasts_s = math.exp(chance.uniform(math.log(least_s), math.log(most_s)))
    else:
        lasts_s = chance.uniform(0.0, _BACK_S)
    return Strike(kind, target, chance.random(), lasts_s)


def _target(chance: Random, case: Case) -> str:
    if chance.random() < _RANK_SHARE:
        return f"rank {chance.choice(case.ranks)}"
    return chance.choice([LAUNCHER, AGENT, *([RELAY] if case.where == "relay" else []), *case.hosts[1:]])
