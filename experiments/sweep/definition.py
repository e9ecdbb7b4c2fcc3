"""The definition of a sweep, and the checks of its settings: scenario, plan, strategy, policy and others."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.carry_out import DEFAULT_STEPS
from experiments.scenarios import ready_scenarios
from experiments.sweep.parameters import Parameter
from planner.schedules import SCHEDULES
from planner.systems.registry import POLICIES, STRATEGIES
from traces.common.errors import InputError, find_by_name

# The setting for a plan file, and the first key of paths into the plan.
PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that has been checked.

    Attributes:
        settings: Settings of every run, by the names in `SETTINGS`; a parameter of the same name overrides a setting.
        parameters: The parameters, in the order of the file.
        draws: Number of draws of the random parameters; 1 if there are none.
    """

    path: Path
    settings: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    draws: int
    seed: int
    slurm: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Return the sweep file's folder, to which paths in the file are relative."""
        return self.path.parent

    @property
    def common(self) -> dict[str, Any]:
        """Return the settings that no parameter changes."""
        changed = {parameter.name for parameter in self.parameters}
        return {name: value for name, value in self.settings.items() if name not in changed}

    def values_of(self, setting: str) -> tuple[Any, ...]:
        """Return all values that a setting has over the points; an empty tuple for a setting that is not given."""
        for parameter in self.parameters:
            if parameter.name == setting:
                return parameter.values
        return (self.settings[setting],) if setting in self.settings else ()


# Settings of a run, each of which can also be a parameter.
SETTINGS = ("scenario", "plan", "strategy", "schedule", "policy", "steps", "duration")

# Settings whose value may be a Python file of the user.
USER_CODE = ("strategy", "policy")


def check_names(settings: Mapping[str, Any], folder: Path, where: str) -> None:
    """Check the names of strategies, schedules and policies in the settings of a file.

    Raises:
        InputError: A name is unknown; the message suggests the nearest one.
    """
    known: dict[str, Mapping[str, Any]] = {"strategy": STRATEGIES, "schedule": SCHEDULES, "policy": POLICIES}
    for setting, things in known.items():
        value = settings.get(setting)
        path = user_file(setting, value, folder)
        if path is not None and not path.is_file():
            raise InputError(f"there is no file '{path}'", where=f"{where}: {setting}", valid="check the path")
        if value is not None and path is None:
            find_by_name(value, things, setting, where=f"{where}: {setting}")


def user_file(setting: str, value: object, folder: Path) -> Path | None:
    """Return the user's Python file, relative to ``folder``, that a setting names; None if it names no file."""
    is_code = setting in USER_CODE and isinstance(value, str) and value.endswith(".py")
    return folder / str(value) if is_code else None


def scenario_path(name: object, folder: Path) -> Path:
    """Return the file of a scenario: the YAML file that ``name`` gives relative to a folder, or a ready scenario's.

    Raises:
        InputError: The name is no text, or belongs to neither.
    """
    text = _text(name, "scenario", "a YAML file or a ready scenario's name")
    path = folder / text
    if path.suffix in (".yaml", ".yml") or len(Path(text).parts) > 1:
        return path
    return find_by_name(text, ready_scenarios(), "scenario", where="scenario")


def run_length(settings: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return a run's number of steps and duration as text; None for one that is not given, `DEFAULT_STEPS` for both.

    Raises:
        InputError: The number of steps or the type of the duration is not valid.
    """
    steps, duration = settings.get("steps"), settings.get("duration")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InputError(f"{steps!r} is no number of steps", where="steps", valid="give a whole number from 1 on")
    if duration is None and steps is None:
        return DEFAULT_STEPS, None
    return steps, None if duration is None else _text(duration, "duration", "text as '60 min'")


def setting_text(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a setting whose value must be text; None if it is not given."""
    value = settings.get(name)
    return None if value is None else _text(value, name, "a name")


def _text(value: object, setting: str, valid: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{value!r} is no text", where=setting, valid=f"give {valid}")
    return value
