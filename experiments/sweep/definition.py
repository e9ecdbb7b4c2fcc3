"""What a sweep is, once its file has been read and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.sweep.parameters import Parameter

# The first key of a path that leads into the plan.
PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that has been checked.

    Attributes:
        path: Of its file.
        settings: What the file says of each run, by the names in `settings.SETTINGS`; parameters go before it.
        parameters: In the order of the file.
        draws: Of the random parameters; 1 without any.
        seed: Of the draws.
        slurm: Settings of Slurm's jobs.
    """

    path: Path
    settings: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    draws: int
    seed: int
    slurm: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """What the paths in the file are relative to."""
        return self.path.parent

    @property
    def common(self) -> dict[str, Any]:
        """The settings that no parameter changes."""
        changed = {parameter.name for parameter in self.parameters}
        return {name: value for name, value in self.settings.items() if name not in changed}

    def values_of(self, setting: str) -> tuple[Any, ...]:
        """Return what a setting is in any of the points; nothing where it is not given."""
        for parameter in self.parameters:
            if parameter.name == setting:
                return parameter.values
        return (self.settings[setting],) if setting in self.settings else ()
