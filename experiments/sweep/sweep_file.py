"""Reads and checks sweep files, which are written in YAML."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.runs.carry_out import bounded
from experiments.sweep.definition import PLAN, SETTINGS, Sweep, check_names, run_length, scenario_path
from experiments.sweep.overrides import Keys, check_path, parse_path
from experiments.sweep.parameters import RANDOM, ParameterEntry, checked_parameter
from planner.files.documents import Document
from planner.files.parsing import STRICT, Part, Positive, Seed, keys_at, parse
from planner.files.plan import read_plan
from planner.files.scenario import ScenarioEntry
from planner.plan.plan import Plan
from traces.common.errors import InputError, unknown_name

MOST_POINTS = 1_000_000


def _check_lengths(sweep: Sweep, document: Document) -> None:
    """Check that the parameters of kind ``list`` have equally many values, since they advance together."""
    lists = [parameter for parameter in sweep.parameters if parameter.kind == "list"]
    for parameter in lists[1:]:
        if len(parameter.values) != len(lists[0].values):
            raise InputError(
                f"the list has {len(parameter.values)} values, but '{lists[0].name}' has {len(lists[0].values)}",
                where=document.where(("parameters", parameter.name)),
                valid="lists go together value by value: give all the same length, or make one a grid",
            )


def _check_size(sweep: Sweep) -> None:
    """Check that the sweep has no more than `MOST_POINTS` points."""
    lists = [parameter for parameter in sweep.parameters if parameter.kind == "list"]
    factors = [parameter for parameter in sweep.parameters if parameter.kind == "grid"] + lists[:1]
    count = sweep.draws * math.prod(len(parameter.values) for parameter in factors)
    if count > MOST_POINTS:
        raise InputError(f"the sweep has {count} points", where=str(sweep.path), valid=f"{MOST_POINTS} at most")


def _check_draws(sweep: Sweep, draws: int | None, document: Document) -> None:
    """Check that a number of draws is given if and only if there are random parameters."""
    drawn = [parameter.name for parameter in sweep.parameters if parameter.kind in RANDOM]
    if drawn and draws is None:
        where = document.where(("parameters", drawn[0]))
        raise InputError("the number of draws is missing", where=where, valid="add 'draws: 100' beside 'parameters'")
    if draws is not None and not drawn:
        where = document.where(("draws",))
        advice = f"remove 'draws', or add a parameter with one of {', '.join(RANDOM)}"
        raise InputError("no parameter is random", where=where, valid=advice)


def _check_settings(sweep: Sweep, document: Document) -> None:
    """Check the settings that all points have in common."""
    given = {name: sweep.values_of(name) for name in SETTINGS}
    if not given["scenario"]:
        raise InputError("the key 'scenario' is missing", where=str(sweep.path), valid="add 'scenario: two-regions'")
    for one, other in (("plan", "strategy"), ("steps", "duration")):
        # A setting whose value is null counts as not given for that point.
        if given[one] and given[other] and None not in (*given[one], *given[other]):
            raise InputError(f"both '{one}' and '{other}' are given", where=str(sweep.path), valid="give one of them")
    check_names(sweep.common, sweep.folder, str(sweep.path))
    if "duration" in sweep.common:
        try:
            bounded(*run_length({"duration": sweep.common["duration"]}))
        except InputError as error:
            raise InputError(error.problem, document.where(("duration",)), error.valid) from None
    if PLAN in sweep.common:
        read_plan(sweep.folder / sweep.common[PLAN])


def _check_paths(sweep: Sweep, document: Document) -> None:
    """Check that all paths lead to values in every scenario and in every plan file."""
    trees = [_whole(scenario_path(name, sweep.folder)) for name in sweep.values_of("scenario")]
    plans = [Document(sweep.folder / str(name)).value for name in sweep.values_of(PLAN) if name is not None]
    known = dict.fromkeys([*keys_at(ScenarioEntry, ()), PLAN, *SETTINGS])
    for parameter in sweep.parameters:
        if parameter.name in SETTINGS:
            continue
        where = document.where(("parameters", parameter.name))
        keys = parse_path(parameter.name, where)
        if keys[0] not in known or (keys[0] in SETTINGS and keys[0] != PLAN):
            raise unknown_name("parameter", keys[0], known, where=where)
        if keys[0] == PLAN:
            _check_plan_path(plans, keys[1:], where)
        else:
            for tree in trees:
                check_path(ScenarioEntry, tree, keys, where)


def _check_plan_path(plans: list[Any], keys: Keys, where: str) -> None:
    """Check a path into plans; if a strategy makes the plan, only the path's first key can be checked."""
    if keys[0] not in keys_at(Plan, ()):
        raise unknown_name("key", keys[0], keys_at(Plan, ()), where=where)
    for plan in plans:
        check_path(Plan, plan, keys, where)


def _whole(path: Path) -> Any:
    """Return the content of a scenario file, with the content of other files in place of their names."""
    document = Document(path)
    if not isinstance(document.value, Mapping):
        return document.value
    parts = [key for key, value in document.value.items() if isinstance(value, str) and key != "name"]
    return {**document.value, **{key: Part(document, key).value for key in parts}}


@dataclass(frozen=True, kw_only=True)
class SweepEntry:
    """A sweep file: the settings of all points, and the parameters that differ between points.

    A parameter replaces the setting of the same name. Files are relative to the sweep file.

    Attributes:
        scenario: A YAML file, or the name of a ready scenario.
        plan: A plan file.
        strategy: Name of the strategy that makes the plan, ``auto`` if absent, or a Python file.
        schedule: Schedule that replaces the strategy's order of actions.
        policy: Name of the policy that adapts the plan, ``none`` if absent, or a Python file.
        steps: Number of training steps, 20 if absent.
        duration: Simulated time after which no step starts, instead of ``steps``, such as ``60 min``.
        parameters: Parameters by name: a path into the scenario or the plan, or a setting of the run.
        draws: Number of draws of the random parameters for every combination of the other parameters.
        seed: Seed of the draws.
        slurm: Settings of Slurm's jobs by submitit's names without ``slurm_``, such as ``partition`` and ``time``.
    """

    scenario: str | None = None
    plan: str | None = None
    strategy: str | None = None
    schedule: str | None = None
    policy: str | None = None
    steps: Positive | None = None
    duration: str | None = None
    parameters: dict[str, ParameterEntry]
    draws: Positive | None = None
    seed: Seed = 0
    slurm: dict[str, str | int | float | bool] = field(default_factory=dict)

    __pydantic_config__ = STRICT


def read_sweep(path: Path) -> Sweep:
    """Return the sweep in a YAML file.

    Raises:
        InputError: The sweep is not valid; the message gives file, line, key and value of the first error.
    """
    document = Document(path)
    if not isinstance(document.value, dict):
        raise InputError("this is no sweep file", where=str(path), valid="write the keys 'scenario' and 'parameters'")
    entry = parse(SweepEntry, document, document.value)
    if not entry.parameters:
        raise InputError("there are no parameters", where=document.where(("parameters",)), valid="give at least one")
    parameters = tuple(
        checked_parameter(name, values, document.where(("parameters", name)))
        for name, values in entry.parameters.items()
    )
    settings = {name: value for name in SETTINGS if (value := getattr(entry, name)) is not None}
    sweep = Sweep(path, settings, parameters, entry.draws or 1, entry.seed, entry.slurm)
    _check_lengths(sweep, document)
    _check_draws(sweep, entry.draws, document)
    _check_size(sweep)
    _check_settings(sweep, document)
    _check_paths(sweep, document)
    return sweep
