"""What a reproduction returns: claims as published and as measured, what each mechanism is worth, and the checks."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.benches.result import Check, Row, table


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline claim.

    Attributes:
        claim: What is claimed, in our words.
        paper: The paper's figure, with its unit: ``up to 12.2x``.
        measured: Ours, in the same unit.
        setting: What it was measured on; every figure in it that the paper does not give is called assumed.
    """

    claim: str
    paper: str
    measured: float
    setting: str


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A published system, measured by us.

    Attributes:
        claims: One for each headline claim.
        ablations: Rows of equal keys: the system with one mechanism off at a time, and what that loses.
        details: Rows of equal keys: every setting measured, also those that show nothing.
        checks: The claims held to their bars.
        remarks: Sentences for the reader: what is assumed, and where a claim does not appear.
        draw: Draws the figure into a PNG file.
    """

    claims: Sequence[Claim]
    ablations: Sequence[Row]
    details: Sequence[Row]
    checks: Sequence[Check]
    remarks: Sequence[str]
    draw: Callable[[Path], None]

    def text(self) -> str:
        """Return all of it for people."""
        parts = [
            table(rows) for rows in ([asdict(claim) for claim in self.claims], self.ablations, self.details) if rows
        ]
        lines = [*(check.text() for check in self.checks), *self.remarks]
        return "\n\n".join([*parts, "\n".join(lines)])

    def document(self) -> dict[str, Any]:
        """Return all of it but the figure, as JSON has it; the claims are the rows."""
        return {
            "rows": [asdict(claim) for claim in self.claims],
            "ablations": list(self.ablations),
            "details": list(self.details),
            "checks": [check.row() for check in self.checks],
            "remarks": list(self.remarks),
        }
