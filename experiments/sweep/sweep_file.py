"""Reads sweep files, which people write in YAML."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from experiments.sweep.checks import check_draws, check_lengths, check_paths, check_settings, check_size
from experiments.sweep.definition import SETTINGS, SettingsEntry, Sweep
from experiments.sweep.parameters import ParameterEntry, checked_parameter
from planner.files.documents import Document
from planner.files.parsing import STRICT, Positive, Seed, parse
from traces.common.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SweepEntry(SettingsEntry):
    """A sweep: what its points have in common, and what differs.

    Attributes:
        parameters: What differs, by name: a path into the scenario or the plan, or a setting of the run.
        draws: So many draws of the random parameters for every combination of the others.
        seed: Of the draws.
        slurm: Settings of Slurm's jobs as submitit takes them, without ``slurm_``: ``partition``, ``time``.
    """

    parameters: dict[str, ParameterEntry]
    draws: Positive | None = None
    seed: Seed = 0
    slurm: dict[str, str | int | float | bool] = field(default_factory=dict)

    __pydantic_config__ = STRICT


def read_sweep(path: Path) -> Sweep:
    """Return the sweep in a YAML file.

    Raises:
        InputError: The first thing that is wrong, with file, line, key, value and what would be valid.
    """
    document = Document(path)
    if not isinstance(document.value, dict):
        raise InputError("this is no sweep", where=str(path), valid="write keys: scenario, parameters")
    entry = parse(SweepEntry, document, document.value)
    if not entry.parameters:
        raise InputError("there are no parameters", where=document.where(("parameters",)), valid="give at least one")
    parameters = tuple(
        checked_parameter(name, values, document.where(("parameters", name)))
        for name, values in entry.parameters.items()
    )
    settings = {name: value for name in SETTINGS if (value := getattr(entry, name)) is not None}
    sweep = Sweep(path, settings, parameters, entry.draws or 1, entry.seed, entry.slurm)
    check_lengths(sweep, document)
    check_draws(sweep, entry.draws, document)
    check_size(sweep)
    check_settings(sweep, document)
    check_paths(sweep, document)
    return sweep


def sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema of sweep files, for editors."""
    return TypeAdapter(SweepEntry).json_schema()
