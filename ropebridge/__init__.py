"""The verbs of the command `ropebridge` as functions, for scripts and notebooks.

An argument ``scenario`` is an object, the path of a file or a run folder, or the name of a ready scenario such as
``"two-regions"``. An argument ``plan`` is an object, the path of a ``.json`` file, or the name of a strategy that makes
the plan. Functions raise `RopebridgeError` for wrong arguments and files; the message names the place and what would be
valid. ``import ropebridge`` is quick, since functions load the modules that they need when they are called.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import pandas as pd

    from planner.adapt.policy import Policy
    from planner.explain.explanation import Explanation
    from planner.plan.plan import Plan
    from planner.runs.record import RunRecord
    from planner.scenario.scenario import Scenario
    from traces.common.errors import RopebridgeError
    from traces.trace import LinkTrace

__all__ = [
    "LinkTrace",
    "Plan",
    "RopebridgeError",
    "RunRecord",
    "Scenario",
    "backtest",
    "compare",
    "explain",
    "make_plan",
    "make_policy",
    "read_plan",
    "read_run",
    "read_scenario",
    "read_trace",
    "report",
    "run",
    "simulate",
    "sweep",
    "write_plan",
]

_CLASSES = {
    "LinkTrace": "traces.trace",
    "Plan": "planner.plan.plan",
    "RopebridgeError": "traces.common.errors",
    "RunRecord": "planner.runs.record",
    "Scenario": "planner.scenario.scenario",
}

AnyPath = str | PathLike[str]
_Kind = TypeVar("_Kind")


def __getattr__(name: str) -> Any:
    """Load a class at its first use."""
    if name not in _CLASSES:
        raise AttributeError(f"module 'ropebridge' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    """List the public names, for completion."""
    return __all__


def read_scenario(name: AnyPath, *, network: Literal["ideal", "tcp", "tcp-wide-area"] | None = None) -> "Scenario":
    """Return the scenario in a YAML file or a run folder, or the ready scenario of this name.

    Args:
        name: A path or a ready scenario's name.
        network: Effects of TCP in a simulation, in place of those in the scenario: ``"tcp-wide-area"`` for those of
            hosts with the settings of the networks that `run` emulates, which is the default of scenarios,
            ``"tcp"`` for those of hosts with Linux's default settings, ``"ideal"`` for none.

    >>> scenario = rb.read_scenario("two-regions")
    >>> [device.name for device in scenario.cluster.devices]
    ['west-gpu', 'east-gpu']
    """
    from dataclasses import replace

    from experiments.runs.scenario import choose_scenario
    from planner.files.effects import BASES
    from traces.common.errors import find_by_name

    scenario = choose_scenario(_text(name, "name", "a path or a ready scenario's name"))
    if network is None:
        return scenario
    effects = replace(scenario.effects, network=find_by_name(network, BASES, "network", where="network"))
    return replace(scenario, effects=effects)


def read_trace(path: AnyPath, *, loops: bool = True) -> "LinkTrace":
    r"""Return the bandwidth trace in a file: CSV with units, Mahimahi, cooked or ``iperf3 --json``.

    Args:
        path: A file in any of these formats.
        loops: Whether the trace repeats after its end; otherwise its last rate holds.

    >>> _ = Path("link.csv").write_text("time_s,bandwidth_mbps\n0,100\n10,40\n20,\n")
    >>> rb.read_trace("link.csv").mean_bps / 1e6
    70.0
    """
    from traces.formats import read_trace as read

    return read(_path(path), loops=loops)


def make_plan(strategy: str, scenario: "Scenario | AnyPath") -> "Plan":
    """Return the plan that a strategy makes, checked against the scenario.

    Args:
        strategy: A strategy's name, such as ``"auto"``, or a Python file with a function ``plan(scenario)``.
        scenario: The scenario with the model and the cluster.

    >>> plan = rb.make_plan("megatron", "two-regions")
    >>> plan.schedule, len(plan.pipelines[0].stages)
    ('1f1b', 2)
    """
    from planner.systems.registry import make_plan as make

    return make(_text(strategy, "strategy", "a strategy's name or a Python file"), _scenario(scenario))


def make_policy(name: str, scenario: "Scenario | AnyPath") -> "Policy | None":
    """Return a new adaptation policy for one run; None for ``"none"``.

    Args:
        name: A policy's name, such as ``"depth"``, or a Python file with a function or class ``policy(scenario)``.
        scenario: The scenario of the run.

    >>> type(rb.make_policy("depth", "two-regions")).__name__
    'DepthPolicy'
    """
    from planner.systems.registry import make_policy as make

    return make(_text(name, "policy", "a policy's name or a Python file"), _scenario(scenario))


def read_plan(path: AnyPath) -> "Plan":
    """Return the plan in a JSON file.

    >>> rb.write_plan(rb.make_plan("gpipe", "two-regions"), "plan.json")
    >>> rb.read_plan("plan.json").strategy
    'gpipe'
    """
    from planner.files.plan import read_plan as read

    return read(_path(path))


def write_plan(plan: "Plan", path: AnyPath) -> None:
    """Write a plan into a JSON file, which `read_plan` and the command's option ``--plan`` read.

    >>> rb.write_plan(rb.make_plan("megatron", "two-regions"), "plan.json")
    """
    from planner.files.plan import write_plan as write
    from planner.plan.plan import Plan

    write(_of_type(plan, Plan, "plan", "a plan's object"), _path(path))


def explain(plan: "Plan | AnyPath", scenario: "Scenario | AnyPath") -> "Explanation":
    """Explain which resource limits the step time of a plan, and what would help; the result prints as a few lines.

    >>> found = rb.explain("megatron", "two-regions")
    >>> f"{found.step_s:.1f} s", found.verdict.cause
    ('0.6 s', 'latency')
    """
    from planner.explain.explanation import explain as explanation_of

    chosen = _scenario(scenario)
    return explanation_of(_plan(plan, chosen), chosen)


def simulate(
    scenario: "Scenario | AnyPath",
    plan: "Plan | AnyPath" = "auto",
    policy: "Policy | str | None" = None,
    steps: int | None = None,
    *,
    duration: str | None = None,
    folder: AnyPath | None = None,
) -> "RunRecord":
    """Simulate the training of a plan, with the traces of the scenario's links.

    Args:
        scenario: The scenario with model, training and cluster.
        plan: The plan to simulate, or the name of a strategy.
        policy: An adaptation policy or its name; None keeps the plan.
        steps: Number of training steps; give either this or ``duration``.
        duration: Simulated time after which no step starts, with its unit, such as ``"60 min"``.
        folder: A new run folder to write, which `read_run` and the command read; None writes nothing.

    >>> record = rb.simulate("two-regions", "megatron", policy="depth", steps=4)
    >>> record.metrics.step_s.round(1).tolist()
    [1.0, 0.5, 0.4, 0.3]
    >>> (record.event_frame.kind == "send").sum().item()
    200
    """
    from experiments.runs.carry_out import bounded, carry_out, check_length
    from sim.simulator import Simulator

    count, duration_s = bounded(steps, duration)
    chosen = _scenario(scenario)
    planned = _plan(plan, chosen)
    check_length(chosen, planned, count, duration_s, on_disk=False)
    return carry_out(chosen, planned, policy, count, _folder(folder), lambda _: Simulator(duration_s))


def run(
    scenario: "Scenario | AnyPath",
    plan: "Plan | AnyPath" = "auto",
    policy: "Policy | str | None" = None,
    steps: int = 20,
    *,
    compute: Literal["real", "paced"] = "real",
    emulate_wan: bool = False,
    on_this_device: bool = False,
    allow_nan: bool = False,
    folder: AnyPath | None = None,
) -> "RunRecord":
    """Run a plan on this machine in real processes, one for each device.

    Args:
        scenario: The scenario with model, training and cluster.
        plan: The plan to run, or the name of a strategy.
        policy: An adaptation policy or its name; None keeps the plan.
        steps: Number of training steps.
        compute: ``"real"`` trains the model whose code the scenario names; ``"paced"`` moves tensors of the true sizes
            and takes the profiled times.
        emulate_wan: Whether to emulate the links and their traces between the processes.
        on_this_device: Whether real compute may use a device of another kind than the plan names.
        allow_nan: Whether to train on if the loss or a parameter is NaN or infinite.
        folder: A new run folder to write, which `read_run` and the command read; None writes nothing.

    Raises:
        RopebridgeError: An argument is wrong, the executor does not support the plan, or a process failed.

    >>> record = rb.run("two-regions", "megatron", steps=2, compute="paced")
    >>> record.backend, len(record.metrics)
    ('paced', 2)
    """
    from experiments.runs.carry_out import carry_out
    from experiments.runs.console import tell
    from experiments.verbs.run import real_backend

    chosen = _scenario(scenario)
    emulator = "auto" if emulate_wan else "none"
    backend = real_backend(compute, emulator=emulator, on_this_device=on_this_device, allow_nan=allow_nan, tell=tell)
    return carry_out(chosen, _plan(plan, chosen), policy, steps, _folder(folder), backend)


def read_run(folder: AnyPath) -> "RunRecord":
    """Return the run in a folder that `simulate`, `run` or the command wrote.

    >>> written = rb.simulate("two-regions", "megatron", steps=2, folder="runs/short")
    >>> rb.read_run("runs/short").event_frame.equals(written.event_frame)
    True
    """
    from experiments.runs.folder import read_record

    return read_record(_path(folder, "folder"))


def compare(*records: "RunRecord | AnyPath") -> "pd.DataFrame":
    """Return a table with a row per run, an object or a folder; ratios are relative to the first run.

    >>> plain, adapted = (rb.simulate("two-regions", "megatron", policy, steps=6) for policy in (None, "depth"))
    >>> rb.compare(plain, adapted)[["step_s", "step_ratio"]].round(2)
                   step_s  step_ratio
    run
    simulated (1)    0.54         1.0
    simulated (2)    0.32         0.6
    """
    import pandas as pd

    from experiments.verbs.report import compare_records

    shown = _records(records)
    return pd.DataFrame(compare_records(shown, _names(shown))).set_index("run")


def report(records: "RunRecord | AnyPath | Iterable[RunRecord | AnyPath]", path: AnyPath) -> None:
    """Write a file that shows runs one below the other.

    Args:
        records: The runs, objects or folders, from top to bottom.
        path: The file, whose suffix is ``.html`` (a page), ``.png`` or ``.svg`` (a figure), or ``.json`` (a trace for
            ui.perfetto.dev).

    >>> rb.report(rb.simulate("two-regions", "megatron", steps=2), "run.json")
    """
    from experiments.verbs.report import report_records

    shown = _records(records)
    report_records(shown, _names(shown), [_path(path)])


def sweep(path: AnyPath, *, folder: AnyPath | None = None, jobs: int | None = None) -> "pd.DataFrame":
    r"""Simulate all points of a sweep file; return a table with a row per point: its parameters and metrics.

    Finished points are kept in the folder, so that an interrupted sweep can be continued. The points run in other
    processes, so a script must call this function below ``if __name__ == "__main__":``; a notebook need not.

    Args:
        path: The sweep file, in YAML: a scenario and parameters.
        folder: The folder for table and logs; None for ``sweeps/NAME``.
        jobs: Number of points that run at the same time; None for the number of this machine's cores.

    Raises:
        RopebridgeError: The sweep file is wrong, or every point failed.

    >>> _ = Path("depths.yaml").write_text(
    ...     "scenario: two-regions\nstrategy: megatron\nsteps: 2\nparameters: {schedule: {grid: [gpipe, 1f1b]}}\n"
    ... )
    >>> rb.sweep("depths.yaml", folder="depths")[["schedule", "step_s"]].round(2)
      schedule  step_s
    0    gpipe    0.39
    1     1f1b    0.54
    """
    import pandas as pd

    from experiments.runs.console import tell
    from experiments.verbs.sweep import carry_out

    result = carry_out(_path(path), _folder(folder), "local", jobs, False, tell)
    return pd.read_parquet(result.table)


def backtest(
    scenario: AnyPath,
    traces: AnyPath,
    policies: Sequence[str] = ("auto",),
    *,
    window: str = "10 min",
    every: str | None = None,
    links: Sequence[str] = (),
    scale: bool = False,
    plan: AnyPath | None = None,
    strategy: str | None = None,
    rivals: Sequence[str] | None = None,
    folder: AnyPath | None = None,
    jobs: int | None = None,
) -> "pd.DataFrame":
    r"""Simulate policies in windows of recorded traces; return a table with a row per run, compared in its window.

    As with `sweep`, finished runs are kept in the folder, and a script must call this function below
    ``if __name__ == "__main__":``.

    Args:
        scenario: A scenario file, or a ready scenario's name.
        traces: A folder of traces, or one trace.
        policies: Names of policies, or Python files; ``"none"`` is added.
        window: Length of each run, with its unit.
        every: Time from the start of a run to the start of the next one in the same trace; None for ``window``.
        links: Names of the links that play the trace, such as ``"west-east"``; empty for all links between regions.
        scale: Whether to scale the traces to the declared rates of the links.
        plan: A plan file with which all policies begin; None if ``strategy`` makes the plan.
        strategy: The strategy that makes it from what is known before each window; None for ``"auto"``.
        rivals: Strategies whose plans, made in hindsight, never change; None for the command's.
        folder: The folder for table and logs; None for ``backtests/SCENARIO``.
        jobs: Number of runs at the same time; None for the number of this machine's cores.

    Raises:
        RopebridgeError: A name or file is wrong, a window is longer than a trace, or every run failed.

    >>> _ = Path("link.csv").write_text("time_s,bandwidth_mbps\n0,120\n20,20\n40,\n")
    >>> how = {"window": "40 s", "strategy": "megatron", "rivals": ["gpipe"]}
    >>> table = rb.backtest("two-regions", "link.csv", ["depth"], **how)
    >>> table[["policy", "gain", "best_static"]].round(2)
             policy  gain   best_static
    0          none  1.00  static:gpipe
    1         depth  1.56  static:gpipe
    2  static:gpipe  1.21  static:gpipe
    """
    import pandas as pd

    from experiments.cli.options import RIVALS
    from experiments.runs.console import tell
    from experiments.sweep.backtest.definition import BacktestConfig
    from experiments.verbs.backtest import carry_out
    from traces.common.units import parse_duration_s

    config = BacktestConfig(
        scenario=_text(scenario, "scenario", "a scenario's file or name"),
        traces=_path(traces, "traces"),
        policies=_listed(policies, "policies"),
        rivals=RIVALS if rivals is None else _listed(rivals, "rivals"),
        links=_listed(links, "links"),
        scaled=scale,
        window_s=parse_duration_s(window, "window"),
        every_s=None if every is None else parse_duration_s(every, "every"),
        plan=None if plan is None else _path(plan, "plan"),
        strategy=strategy,
    )
    return pd.read_parquet(carry_out(config, _folder(folder), "local", jobs, False, tell).table)


def _text(value: AnyPath, where: str, valid: str) -> str:
    from traces.common.errors import InputError, shown

    if not isinstance(value, str | PathLike):
        raise InputError(f"{shown(value)} is not allowed", where=where, valid=f"give {valid}")
    return fspath(value)


def _path(path: AnyPath, where: str = "path") -> Path:
    return Path(_text(path, where, "a path"))


def _folder(path: AnyPath | None) -> Path | None:
    return None if path is None else _path(path, "folder")


def _listed(names: Sequence[str], where: str) -> Sequence[str]:
    from traces.common.errors import InputError, shown

    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InputError(f"{shown(names)} is not allowed", where=where, valid="give a list of names")
    return tuple(names)


def _scenario(scenario: "Scenario | AnyPath") -> "Scenario":
    from planner.scenario.scenario import Scenario

    if isinstance(scenario, str | PathLike):
        return read_scenario(scenario)
    return _of_type(scenario, Scenario, "scenario", "a scenario's object, file or name")


def _records(records: "RunRecord | AnyPath | Iterable[RunRecord | AnyPath]") -> "list[RunRecord]":
    from planner.runs.record import RunRecord
    from traces.common.errors import InputError

    if isinstance(records, str | PathLike | RunRecord) or not isinstance(records, Iterable):
        several: list[RunRecord | AnyPath] = [records]
    else:
        several = list(records)
    if not several:
        raise InputError("no run is given", valid="give at least one")
    read = (read_run(each) if isinstance(each, str | PathLike) else each for each in several)
    return [_of_type(each, RunRecord, "run", "the record or the folder of a run") for each in read]


def _of_type(value: object, kind: type[_Kind], what: str, valid: str) -> _Kind:
    from traces.common.errors import InputError, shown

    if not isinstance(value, kind):
        raise InputError(f"{shown(value)} is no {what}", valid=f"give {valid}")
    return value


def _plan(plan: "Plan | AnyPath", scenario: "Scenario") -> "Plan":
    from experiments.runs.scenario import choose_plan
    from planner.check import check_plan
    from planner.plan.plan import Plan

    if not isinstance(plan, str | PathLike):
        made = _of_type(plan, Plan, "plan", "a plan's object or file, or a strategy's name")
        check_plan(made, scenario)
        return made
    if (path := Path(plan)).suffix == ".json":
        return choose_plan(scenario, path, None)
    return choose_plan(scenario, None, fspath(plan))


def _names(records: Sequence["RunRecord"]) -> list[str]:
    from experiments.verbs.report import numbered

    return numbered([record.backend for record in records])
