"""Results of the fidelity bench that are kept in a folder, so that a bench that was interrupted goes on."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.runs.metrics import Metrics
from planner.runs.record import RunRecord
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError


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
    """The real runs of each case, one file ``NAME.json`` for each case.

    Real runs count only beside the simulation that they were compared with: if a case is simulated with another result,
    because the simulator has changed, they are measured again. If the executor or the machine has changed, choose
    another folder: this is not noticed.

    Args:
        folder: The folder, which is made if it does not exist; None to keep nothing.

    Raises:
        InputError: The folder cannot be made.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem, advice = f"no folder can be made here: {error.strerror}", "choose another folder"
                raise InputError(problem, where=str(folder), valid=advice) from error

    def real_runs(self, name: str, simulated: Measured) -> list[Measured]:
        """Return the real runs of a case that were measured beside an equal simulation.

        Raises:
            InputError: The case's file is damaged.
        """
        path = self._path(name)
        if path is None or not path.is_file():
            return []
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if Measured.from_json(document["simulated"]) != simulated:
                return []
            return [Measured.from_json(each) for each in document["real"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            advice = "remove it, and the case is run again"
            raise InputError("no results of a case are in this file", where=str(path), valid=advice) from error

    def keep(self, name: str, simulated: Measured, real: list[Measured]) -> None:
        """Write the runs of a case."""
        path = self._path(name)
        if path is not None:
            document = {"simulated": asdict(simulated), "real": [asdict(each) for each in real]}
            write_text_atomically(path, json.dumps(document))

    def _path(self, name: str) -> Path | None:
        return self._folder / f"{name}.json" if self._folder is not None else None
