"""The verbs `demo`, `plan`, `simulate`, `compare`, `report`, `sweep` and `backtest`."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import (
    MOST,
    POLICIES,
    RIVALS,
    BackupOption,
    DynamicOption,
    EngineOption,
    FolderOption,
    JobsOption,
    JsonOption,
    OrdersOption,
    PlanOption,
    PolicyOption,
    RetryOption,
    ScenarioArgument,
    ScheduleOption,
    StrategyOption,
    one_of,
)
from experiments.runs.console import say, tell, tell_of_compiling
from traces.common.atomic import scratch_folder


def demo(output: FolderOption = None, as_json: JsonOption = False) -> None:
    """Plan, simulate, run for real on this machine, compare, draw. Example: ropebridge demo."""
    from experiments.verbs.demo import demo as verb

    tell_of_compiling()
    say(verb(output, as_json, tell))


def plan(
    scenario: ScenarioArgument,
    strategy: StrategyOption = None,
    schedule: ScheduleOption = None,
    dynamic: DynamicOption = False,
    orders: OrdersOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the plan to.")] = None,
    torch_csv: Annotated[
        Path | None, typer.Option(help="CSV of the schedule for torch.distributed.pipelining.")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Strategy auto: throughput, the cost of a step, time-to-loss, or cost-to-loss.",
            show_default="throughput",
            autocompletion=one_of(("throughput", "cost", "time-to-loss", "cost-to-loss")),
        ),
    ] = None,
    loss: Annotated[
        float | None, typer.Option("--loss", help="Objectives time-to-loss and cost-to-loss: the loss to reach.")
    ] = None,
    assumed_tokens: Annotated[
        int | None,
        typer.Option(
            "--assume-convergence",
            metavar="TOKENS",
            min=1,
            max=1_000_000,
            help="Plan to a loss without a convergence file, by published laws of language models; tokens of a sample.",
        ),
    ] = None,
    budget_per_hour: Annotated[
        float | None,
        typer.Option("--budget", metavar="USD_PER_HOUR", help="Strategy auto: largest cost."),
    ] = None,
    rate_samples_per_s: Annotated[
        float | None,
        typer.Option("--rate", metavar="SAMPLES_PER_S", help="Strategy auto: least throughput."),
    ] = None,
    robust_share: Annotated[
        float | None,
        typer.Option(
            "--robust",
            metavar="QUANTILE",
            help="Strategy auto: largest share of time windows in which the plan is slower.",
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what limits the plan, and what would help.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a plan, for throughput, cost or a loss. Example: ropebridge plan cloud-edge-end --explain -o plan.json."""
    from experiments.runs.scenario import Ordering
    from experiments.verbs.plan import PlanObjective
    from experiments.verbs.plan import plan as verb

    tell_of_compiling()
    best = PlanObjective(objective, budget_per_hour, rate_samples_per_s, robust_share, loss, assumed_tokens)
    ordering = Ordering(schedule, dynamic, orders)
    say(verb(scenario, strategy, ordering, output, torch_csv, as_json, best, explain))


def simulate(
    scenario: ScenarioArgument,
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    schedule: ScheduleOption = None,
    dynamic: DynamicOption = False,
    orders: OrdersOption = None,
    policy: PolicyOption = "none",
    backup_every: BackupOption = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Number of training steps.", show_default="20")
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(help="Simulated time after which no step starts, such as '60 min'; instead of --steps."),
    ] = None,
    output: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the training with a plan. Example: ropebridge simulate cloud-edge-end --policy depth."""
    from experiments.runs.carry_out import bounded, carry_out, check_length, present
    from experiments.runs.folder import EVENTS
    from experiments.runs.scenario import Ordering, choose_plan, choose_scenario
    from sim.simulator import Simulator

    tell_of_compiling()
    count, duration_s = bounded(steps, duration)
    chosen = choose_scenario(scenario)
    planned = choose_plan(chosen, plan, strategy, Ordering(schedule, dynamic, orders))
    check_length(chosen, planned, count, duration_s, on_disk=True)

    with scratch_folder() as temporary:

        def simulator(folder: Path | None) -> Simulator:
            # Long simulations do not fit into memory.
            return Simulator(duration_s, backup_every, (folder or temporary) / EVENTS)

        record = carry_out(chosen, planned, policy, count, output, simulator)
        say(present(record, as_json))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders; the first is the reference.")],
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side, simulated or real. Example: ropebridge compare runs/simulated runs/real."""
    from experiments.verbs.report import compare as verb

    say(verb(runs, as_json))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or a sweep's folder.")],
    outputs: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="What to write, by its suffix: .html (a page that opens from the disk), .png or .svg (a figure), "
            ".json (for ui.perfetto.dev). Can be given several times.",
            show_default="report.html in the first folder",
        ),
    ] = None,
) -> None:
    """Show runs, or a sweep, on a page or in figures. Example: ropebridge report runs/plain runs/real -o both.html."""
    from experiments.verbs.report import report as verb

    say(verb(runs, outputs or []))


def sweep(
    path: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep file in YAML: a scenario and parameters.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for the table; an existing sweep goes on.", show_default="sweeps/NAME"
        ),
    ] = None,
    engine: EngineOption = "local",
    jobs: JobsOption = None,
    retry_failed: RetryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate over grids, lists or draws of parameters. Example: ropebridge sweep links.yaml -j 2."""
    from experiments.verbs.sweep import sweep as verb

    say(verb(path, output, engine, jobs, as_json, retry_failed, tell))


def backtest(
    scenario: ScenarioArgument,
    traces: Annotated[Path, typer.Option(help="Folder of recorded traces, or one trace, in any format.")],
    policies: Annotated[
        str, typer.Option(metavar="A,B,C", help=f"Policies to judge: {', '.join(POLICIES)}; or Python files.")
    ] = "auto",
    window: Annotated[str, typer.Option(help="Length of each run, with its unit.")] = "10 min",
    every: Annotated[
        str | None,
        typer.Option(help="Time from one run's start to the next in a trace.", show_default="the window"),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="A-B,C->D",
            help="Links that play the trace, in both directions or in one.",
            show_default="all between regions",
        ),
    ] = None,
    scale: Annotated[
        bool, typer.Option("--scale", help="Scale traces so that their mean is the link's declared rate.")
    ] = False,
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    rivals: Annotated[
        str,
        typer.Option(metavar="A,B,C", help="Strategies whose plans, made in hindsight, never change."),
    ] = ",".join(RIVALS),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the table; an existing backtest goes on.",
            show_default="backtests/SCENARIO",
        ),
    ] = None,
    engine: EngineOption = "local",
    slurm: Annotated[
        list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="A setting of Slurm's jobs.")
    ] = None,
    jobs: JobsOption = None,
    retry_failed: RetryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge policies on recorded traces. Example: ropebridge backtest four-sites --traces DIR --policies auto,depth."""
    from experiments.sweep.backtest.definition import BacktestConfig
    from experiments.verbs.backtest import backtest as verb
    from traces.common.text import key_and_value
    from traces.common.units import parse_duration_s

    settings = dict(key_and_value(setting, "partition=batch", "--slurm") for setting in slurm or [])
    config = BacktestConfig(
        scenario=scenario,
        traces=traces,
        policies=_listed(policies),
        rivals=_listed(rivals),
        links=_listed(link or ""),
        scaled=scale,
        window_s=parse_duration_s(window, "--window"),
        every_s=None if every is None else parse_duration_s(every, "--every"),
        plan=plan,
        strategy=strategy,
        slurm={key: int(value) if value.isdecimal() else value for key, value in settings.items()},
    )
    say(verb(config, output, engine, jobs, as_json, retry_failed, tell))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for each in text.split(",") if (part := each.strip()))
