"""The command `ropebridge`. Each verb loads what it needs when it is called, so that `--help` answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.deploy import add_to
from experiments.cli.options import (
    ComputeChoice,
    DurationOption,
    DynamicOption,
    EmulatorOption,
    FolderOption,
    JsonOption,
    OrdersOption,
    PlanOption,
    PolicyOption,
    ScenarioArgument,
    ScheduleOption,
    StepsOption,
    StrategyOption,
)
from experiments.cli.profile import profile_app
from experiments.cli.sweep import sweep
from experiments.cli.traces import traces_app
from experiments.runs.console import CommandInterruptedError, raise_when_interrupted, say, tell
from traces.common.errors import InputError, RopebridgeError

app = typer.Typer(
    name="ropebridge",
    help="Plan, simulate and run the training of one model on unlike devices in several regions.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(traces_app, name="traces")
app.add_typer(profile_app, name="profile")
app.command("sweep")(sweep)


@app.command()
def demo(output: FolderOption = None, as_json: JsonOption = False) -> None:
    """Plan, simulate, run for real here, compare, draw: three regions, four devices. Example: ropebridge demo."""
    import json

    from experiments.verbs import demo as verb

    done = verb.demo(output, tell)
    say(json.dumps(done.result) if as_json else verb.describe_demo(done))


@app.command()
def plan(
    scenario: ScenarioArgument,
    strategy: StrategyOption = None,
    schedule: ScheduleOption = None,
    dynamic: DynamicOption = False,
    orders: OrdersOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the plan to.")] = None,
    torch_csv: Annotated[
        Path | None,
        typer.Option("--torch-csv", help="File for the schedule in torch.distributed.pipelining's form."),
    ] = None,
    objective: Annotated[
        str | None, typer.Option("--objective", help="Strategy auto: throughput (default), or cost of a step.")
    ] = None,
    budget_per_hour: Annotated[
        float | None, typer.Option("--budget", metavar="USD_PER_HOUR", help="Strategy auto: what it may cost.")
    ] = None,
    rate_samples_per_s: Annotated[
        float | None, typer.Option("--rate", metavar="SAMPLES_PER_S", help="Strategy auto: what it must reach.")
    ] = None,
    robust_share: Annotated[
        float | None,
        typer.Option(
            "--robust", metavar="QUANTILE", help="Strategy auto: slower in this share of time windows at most."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what binds the plan, and what would help.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a scenario into a plan. Example: ropebridge plan cloud-edge-end --strategy auto --explain -o plan.json."""
    from experiments.runs.scenario import Ordering
    from experiments.verbs.plan import PlanObjective
    from experiments.verbs.plan import plan as verb

    asked = PlanObjective(objective, budget_per_hour, rate_samples_per_s, robust_share)
    ordering = Ordering(schedule, dynamic, orders)
    say(verb(scenario, strategy, ordering, output, torch_csv, as_json, asked, explain))


@app.command()
def simulate(
    scenario: ScenarioArgument,
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    schedule: ScheduleOption = None,
    dynamic: DynamicOption = False,
    orders: OrdersOption = None,
    policy: PolicyOption = "none",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.", show_default="20")] = None,
    duration: DurationOption = None,
    output: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan in the model of its cluster. Example: ropebridge simulate two-regions --policy depth."""
    from experiments.runs.carry_out import bounded, carry_out, present
    from experiments.runs.scenario import Ordering, choose_plan, choose_scenario
    from sim.simulator import Simulator

    count, duration_s = bounded(steps, duration)
    ordering = Ordering(schedule, dynamic, orders)
    chosen = choose_scenario(scenario)
    planned = choose_plan(chosen, plan, strategy, ordering)
    record = carry_out(chosen, planned, policy, count, output, lambda _: Simulator(duration_s))
    say(present(record, as_json))


@app.command()
def run(
    scenario: ScenarioArgument,
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    schedule: ScheduleOption = None,
    dynamic: DynamicOption = False,
    orders: OrdersOption = None,
    policy: PolicyOption = "none",
    compute: Annotated[
        ComputeChoice, typer.Option("--compute", help="Train the model, or move its bytes at the profile's pace.")
    ] = ComputeChoice.REAL,
    emulate_wan: Annotated[
        bool, typer.Option("--emulate-wan", help="Make this machine's network behave as the links and traces say.")
    ] = False,
    emulator: Annotated[
        EmulatorOption | None,
        typer.Option(
            "--emulator",
            help="Emulate links with: relay (below TCP), shaper (holds messages back), auto (relay if it can).",
        ),
    ] = None,
    backup_every: Annotated[
        int,
        typer.Option("--backup-every", min=0, help="Copy the state so often, in steps, and go on when ranks are lost."),
    ] = 0,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Folder to write the training state into, now and then.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=1, help="Steps from one checkpoint to the next (10).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint, with the plan that it had.")
    ] = False,
    live: Annotated[bool, typer.Option("--live", help="Show the run in the terminal while it goes on.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard, written while the run goes on.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option("--prometheus", metavar="ADDRESS:PORT", help="Where Prometheus may ask for it.")
    ] = None,
    steps: StepsOption = 20,
    output: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan for real, a process per device. Example: ropebridge run two-regions --compute paced --emulate-wan."""
    from executor.core.job import EmulatorChoice
    from experiments.runs.carry_out import carry_out, present, real_backend
    from experiments.runs.live import watching
    from experiments.runs.scenario import Ordering, choose_plan, choose_scenario
    from experiments.verbs.resume import checkpoint_orders, resumed_plan

    described = choose_scenario(scenario)
    checkpoints, had = checkpoint_orders(checkpoint, checkpoint_every, resume, described, steps, tell)
    chosen: EmulatorChoice = "auto" if emulate_wan else "none"
    if emulator is not None:
        chosen = emulator.value

    ordering = Ordering(schedule, dynamic, orders)
    if had is not None and plan is None and strategy is None:
        planned = resumed_plan(had, described, ordering)
    else:
        planned = choose_plan(described, plan, strategy, ordering)
    with watching(live=live, tensorboard=tensorboard, prometheus=prometheus, tell=tell) as watch:
        backend = real_backend(
            compute.value,
            emulator=chosen,
            backup_every=backup_every,
            checkpoints=checkpoints,
            watch=watch,
            tell=tell,
        )
        record = carry_out(described, planned, policy, steps, output, backend)
    say(present(record, as_json))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders; ratios are against the first.")],
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side, simulated or real. Example: ropebridge compare runs/simulated runs/real."""
    from experiments.verbs.report import compare as verb

    say(verb(runs, as_json))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, a folder of them, or a sweep's.")],
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


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="What to measure: accuracy, adaptation, executor, fidelity, planner, profile, recovery, report, "
            "schedules, simulator, sweep.",
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and steps.")] = False,
    runs: Annotated[Path | None, typer.Option("--runs", help="accuracy: folder of measured runs.")] = None,
    times: Annotated[Path | None, typer.Option("--times", help="accuracy: layer times of their model.")] = None,
    sizes: Annotated[Path | None, typer.Option("--sizes", help="accuracy: layer sizes of it.")] = None,
    network: Annotated[Path | None, typer.Option("--network", help="accuracy: rates between their nodes.")] = None,
    model: Annotated[str, typer.Option("--model", help="accuracy: the model's name in these files.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Measure ropebridge on this machine and hold it to its bars. Example: ropebridge bench fidelity --quick."""
    from experiments.verbs.bench import bench as verb

    files = (runs, times, sizes, network, model)
    text, holds = verb(name, quick, as_json, tell, files if any(files) else None)
    say(text)
    if not holds:
        raise typer.Exit(1)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="asteroid, cannikin, cloudless or deepcee.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer settings and steps.")] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="Run settings of it for real, and hold that against the simulator.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the result and its figure.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a published system's claims against what we measure. Example: ropebridge reproduce asteroid --quick."""
    from experiments.verbs.bench import execute_reproduction
    from experiments.verbs.bench import reproduce as verb

    if execute:
        text, holds = execute_reproduction(name, as_json, output, tell)
    else:
        text, holds = verb(name, quick, as_json, output, tell)
    say(text)
    if not holds:
        raise typer.Exit(1)


add_to(app)


def main() -> None:
    """Run the command; exit with 0 on success, 1 on a failed run, 2 on wrong input."""
    raise_when_interrupted()
    # A terminal without the characters of a sparkline gets question marks, not a traceback.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app()
    except RopebridgeError as error:
        tell(f"ropebridge: {error}")
        for note in getattr(error, "__notes__", []):
            tell(note)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        tell(
            f"ropebridge: this verb runs for real and needs {error.name}, which is not installed; "
            "pip install 'ropebridge[executor]'"
        )
        sys.exit(2)
    except CommandInterruptedError:
        tell("ropebridge: interrupted")
        sys.exit(130)
