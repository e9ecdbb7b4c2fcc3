"""Results of benches and reproductions: the measured rows, and checks that hold figures to fixed limits ("bars")."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, str | float | int]


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and its bar.

    Attributes:
        name: What is measured, with its unit.
        value: The figure that was measured.
        bar: The limit that the figure must meet.
        at_most: Whether the bar is an upper limit; otherwise it is a lower one.
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
        """Return the check in one line for people."""
        sign = "<=" if self.at_most else ">="
        return f"{self.name}: {self.value:.4g} {sign} {self.bar:g}: {'holds' if self.holds else 'DOES NOT HOLD'}"


def at_least(name: str, value: float, bar: float) -> Check:
    """Return a check that a value is not below its bar."""
    return Check(name, value, bar, at_most=False)


def at_most(name: str, value: float, bar: float) -> Check:
    """Return a check that a value is not above its bar."""
    return Check(name, value, bar, at_most=True)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Measured rows and checks; a column that a row lacks is empty in the table."""

    rows: Sequence[Row]
    checks: Sequence[Check]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", same_columns(self.rows))

    def document(self) -> dict[str, Any]:
        """Return rows and checks for JSON."""
        return {"rows": self.rows, "checks": [check.row() for check in self.checks]}

    def text(self) -> str:
        """Return a table of the rows, then the checks, for people."""
        return "\n".join([_table(self.rows), *(check.text() for check in self.checks)])


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline claim of a published system.

    Attributes:
        claim: The claim in our words.
        paper: The paper's figure, with its unit: ``up to 12.2x``.
        measured: Our figure, in the same unit.
        setting: The setting of our measurement; figures that the paper does not give are marked as assumed.
    """

    claim: str
    paper: str
    measured: float
    setting: str


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A published system, measured by us.

    Attributes:
        claims: The headline claims.
        ablations: Rows of the system with one mechanism off at a time, and what that loses.
        details: Rows of every measured setting.
        checks: The claims held to their bars.
        remarks: Sentences for the reader on assumptions, and on settings in which a claim does not hold.
        draw: Draws the figure into a PNG file.
    """

    claims: Sequence[Claim]
    ablations: Sequence[Row]
    details: Sequence[Row]
    checks: Sequence[Check]
    remarks: Sequence[str]
    draw: Callable[[Path], None]

    def text(self) -> str:
        """Return the whole reproduction as text for people."""
        tables = [_table(rows) for rows in (list(map(asdict, self.claims)), self.ablations, self.details) if rows]
        lines = [*(check.text() for check in self.checks), *self.remarks]
        return "\n\n".join([*tables, "\n".join(lines)])

    def document(self) -> dict[str, Any]:
        """Return everything but the figure for JSON; the claims are the rows."""
        return {
            "rows": list(map(asdict, self.claims)),
            "ablations": list(self.ablations),
            "details": same_columns(self.details),
            "checks": [check.row() for check in self.checks],
            "remarks": list(self.remarks),
        }


def same_columns(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the union of their keys, in order of first appearance; missing values are empty."""
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in columns} for row in rows]


def _table(rows: Sequence[Row]) -> str:
    lines = [[_cell(cell) for cell in row.values()] for row in same_columns(rows)]
    columns = [[head, *cells] for head, *cells in zip(same_columns(rows)[0], *lines, strict=True)]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def plain_number(value: Any) -> Any:
    """Return a NumPy number as Python's own, for JSON."""
    return value.item()


def _cell(value: str | float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
