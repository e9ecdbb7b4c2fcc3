"""Real runs of the fidelity bench that are kept in a folder, so that a bench that was interrupted goes on."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.benches.kept import KeptResults
from planner.runs.metrics import Metrics
from planner.runs.record import RunRecord


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run of a case measured.

    Attributes:
        changes: What each decision of the policy changed (`Decision.change`), in the order of decisions.
        moves_layers: Whether a decision moved layers.
    """

    metrics: Metrics
    changes: tuple[str, ...] = ()
    moves_layers: bool = False

    @classmethod
    def of(cls, record: RunRecord, metrics: Metrics) -> "Measured":
        """Return what a run measured, without its events."""
        moves = any(decision.migration.moves for decision in record.decisions)
        return cls(metrics, tuple(decision.change for decision in record.decisions), moves)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measured":
        """Return the object whose `dataclasses.asdict` is ``data``."""
        return cls(Metrics(**data["metrics"]), tuple(data["changes"]), data["moves_layers"])


class KeptRuns:
    """The real runs of each case.

    Real runs count only beside the simulation that they were compared with: if a case is simulated with another result,
    because the simulator has changed, they are measured again.

    Args:
        folder: The folder, as `KeptResults` takes it.

    Raises:
        InputError: The folder cannot be made.
    """

    def __init__(self, folder: Path | None) -> None:
        self._kept = KeptResults(folder)

    def real_runs(self, name: str, simulated: Measured) -> list[Measured]:
        """Return the real runs of a case that were measured beside an equal simulation.

        Raises:
            InputError: The case's file is damaged.
        """
        document = self._kept.read(name)
        try:
            if document is None or Measured.from_json(document["simulated"]) != simulated:
                return []
            return [Measured.from_json(each) for each in document["real"]]
        except (LookupError, TypeError) as error:
            raise self._kept.damaged(name) from error

    def keep(self, name: str, simulated: Measured, real: list[Measured]) -> None:
        """Write the runs of a case."""
        self._kept.write(name, {"simulated": asdict(simulated), "real": [asdict(each) for each in real]})
