"""Ablations: what each mechanism of a system earns, and which mechanisms earn nothing."""

from collections.abc import Mapping, Sequence
from statistics import median

from experiments.benches.result import Row

# A mechanism moves a setting if the figure with it differs by more than this share from the figure without it.
MOVES = 1e-3

NOTHING = "changes nothing"


def ablation_rows(gains: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return a row for each mechanism, from its ``gains``: ratios of the figure with it to the figure without it.

    A gain is infinite in a setting in which nothing runs without the mechanism.
    """
    return [_row(mechanism, values) for mechanism, values in gains.items()]


def _row(mechanism: str, gains: Sequence[float]) -> Row:
    better, worse = (sum(sign * (gain - 1) > MOVES for gain in gains) for sign in (1, -1))
    verdict = f"earns in {better}, costs in {worse} of {len(gains)} settings" if better or worse else NOTHING
    return {
        "mechanism": mechanism,
        "settings": len(gains),
        "moved": better + worse,
        "median_gain": median(gains) if gains else 1.0,
        "least_gain": min(gains, default=1.0),
        "largest_gain": max(gains, default=1.0),
        "verdict": verdict,
    }


def without_effect(rows: Sequence[Row]) -> list[str]:
    """Return the mechanisms whose removal changes nothing in any setting."""
    return [str(row["mechanism"]) for row in rows if row["verdict"] == NOTHING]
