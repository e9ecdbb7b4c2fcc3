"""What a bench returns: the rows it measured, and the checks that hold them to bars."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, str | float | int]


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and its bar.

    Attributes:
        name: What is measured, with its unit.
        value: The figure that was measured.
        bar: What it is held to.
        at_most: Whether the bar is an upper one; otherwise it is a lower one.
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
        """Return the check as JSON has it."""
        return {**asdict(self), "holds": self.holds}

    def text(self) -> str:
        """Return the check in one line for people."""
        sign = "<=" if self.at_most else ">="
        return f"{self.name}: {self.value:.4g} {sign} {self.bar:g}: {'holds' if self.holds else 'DOES NOT HOLD'}"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Rows of equal keys, and checks."""

    rows: Sequence[Row]
    checks: Sequence[Check]

    def document(self) -> dict[str, Any]:
        """Return rows and checks as JSON has them."""
        return {"rows": list(self.rows), "checks": [check.row() for check in self.checks]}

    def text(self) -> str:
        """Return a table of the rows, then the checks, for people."""
        return "\n".join([table(self.rows), *(check.text() for check in self.checks)])


def table(rows: Sequence[Row]) -> str:
    """Return rows of equal keys as a table for people."""
    heads = list(rows[0])
    cells = [heads, *([_cell(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def plain_number(value: Any) -> Any:
    """Return a NumPy number as Python's own, for JSON."""
    return value.item()


def _cell(value: str | float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
