"""What a bench returns: the rows it measured, and the checks that hold them to bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, str | float | int]


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and its bar.

    Attributes:
        name: What is measured, with its unit.
        value: The figure.
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


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Rows of equal keys, and checks."""

    rows: Sequence[Row]
    checks: Sequence[Check]

    def text(self) -> str:
        """Return a table of the rows, then the checks, for people."""
        heads = list(self.rows[0])
        cells = [heads, *([_cell(row[head]) for head in heads] for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        for check in self.checks:
            sign = "<=" if check.at_most else ">="
            verdict = "holds" if check.holds else "DOES NOT HOLD"
            lines.append(f"{check.name}: {check.value:.4g} {sign} {check.bar:g}: {verdict}")
        return "\n".join(lines)


def _cell(value: str | float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
