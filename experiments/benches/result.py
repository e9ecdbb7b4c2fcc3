"""Results of benches and reproductions: measured rows, and checks of figures against fixed limits, called bars."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from experiments.runs.console import aligned

Row = Mapping[str, str | float | int]


@dataclass(frozen=True, slots=True)
class Check:
    """A measured figure, ``value``, and the fixed limit, ``bar``, that the figure must meet.

    Attributes:
        name: The quantity that is measured, with its unit.
        at_most: Whether the bar is an upper limit; otherwise it is a lower limit.
    """

    name: str
    value: float
    bar: float
    at_most: bool

    @property
    def holds(self) -> bool:
        """Whether the figure meets its bar."""
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def row(self) -> dict[str, Any]:
        """Return the check as a row for JSON."""
        return {**asdict(self), "holds": self.holds}

    def text(self) -> str:
        """Return the check as one line of text."""
        sign = "<=" if self.at_most else ">="
        return f"{self.name}: {self.value:.4g} {sign} {self.bar:g}: {'holds' if self.holds else 'DOES NOT HOLD'}"


def at_least(name: str, value: float, bar: float) -> Check:
    """Return the check that a value is not below a limit, its bar."""
    return Check(name, value, bar, at_most=False)


def at_most(name: str, value: float, bar: float) -> Check:
    """Return the check that a value is not above a limit, its bar."""
    return Check(name, value, bar, at_most=True)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The measured rows of a bench and its checks; a column that a row lacks is empty in the table."""

    rows: Sequence[Row]
    checks: Sequence[Check]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", same_columns(self.rows))

    def document(self) -> dict[str, Any]:
        """Return rows and checks for JSON."""
        return {"rows": self.rows, "checks": [check.row() for check in self.checks]}

    def text(self) -> str:
        """Return a table of the rows and the checks as text."""
        return "\n".join([_table(self.rows), *(check.text() for check in self.checks)])


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline claim of a published system.

    Attributes:
        paper: The paper's figure, with its unit: ``up to 12.2x``.
        measured: The figure measured here, in the same unit.
        setting: The setting of the measurement; figures that the paper does not give are marked as assumed.
    """

    claim: str
    paper: str
    measured: float
    setting: str


@dataclass(frozen=True, slots=True)
class JudgedClaim(Claim):
    """A claim that is judged in every setting; ``measured`` is the median of the settings.

    Attributes:
        least: The least of all settings.
        largest: The largest of all settings.
        bar: The value from which on the claim appears in a setting; of a claim that a figure stays below a limit, this
            limit.
        settings: Number of settings.
        appears: Number of settings in which the claim appears.
        verdict: ``appears``, ``appears in k of n settings``, ``does not appear``, or ``no setting`` if there is none.
    """

    least: float
    largest: float
    bar: float
    settings: int
    appears: int
    verdict: str


def judge_claim(
    claim: str, paper: str, values: Sequence[float], bar: float, where: str, *, below: bool = False
) -> JudgedClaim:
    """Return the verdict on a claim, given the ``values`` of its figure: it appears in a setting from ``bar`` on.

    With ``below`` it appears where the figure is below ``bar``.
    """
    appears, count = sum(value < bar if below else value >= bar for value in values), len(values)
    verdict = f"appears in {appears} of {count} settings"
    if appears in (0, count):
        verdict = ("appears" if appears else "does not appear") if count else "no setting"
    spread = (median(values), min(values), max(values)) if values else (0.0, 0.0, 0.0)
    return JudgedClaim(claim, paper, spread[0], where, *spread[1:], bar, count, appears, verdict)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The measurements of a published system.

    Attributes:
        ablations: Rows of the system with one mechanism off at a time, and the loss of performance.
        details: Rows of every measured setting.
        checks: Checks of the measured figures against those that the paper claims.
        remarks: Sentences on assumptions, and on settings in which a claim does not hold.
        draw: Draws the figure into a PNG file.
    """

    claims: Sequence[Claim]
    ablations: Sequence[Row]
    details: Sequence[Row]
    checks: Sequence[Check]
    remarks: Sequence[str]
    draw: Callable[[Path], None]

    def text(self) -> str:
        """Return all tables, checks and remarks as text."""
        tables = [_table(rows) for rows in (list(map(asdict, self.claims)), self.ablations, self.details) if rows]
        lines = [*(check.text() for check in self.checks), *self.remarks]
        return "\n\n".join([*tables, "\n".join(lines)])

    def document(self) -> dict[str, Any]:
        """Return everything except the figure as values for JSON; the claims are its rows."""
        return {
            "rows": _finite(list(map(asdict, self.claims))),
            "ablations": _finite(self.ablations),
            "details": _finite(same_columns(self.details)),
            "checks": [check.row() for check in self.checks],
            "remarks": list(self.remarks),
        }


def same_columns(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the union of their keys, in order of first appearance; missing values are empty."""
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in columns} for row in rows]


def _finite(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with "inf" in place of infinite numbers, which JSON lacks."""
    return [{key: "inf" if cell == inf else cell for key, cell in row.items()} for row in rows]


def _table(rows: Sequence[Row]) -> str:
    same = same_columns(rows)
    return "\n".join(aligned([list(same[0]), *([_cell(cell) for cell in row.values()] for row in same)]))


def plain_number(value: Any) -> Any:
    """Convert a NumPy number to a Python number, for JSON."""
    return value.item()


def _cell(value: str | float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
