"""The command `ropebridge`. Each verb loads what it needs when it is called, so that `--help` answers at once."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from experiments.console import say, tell
from experiments.interrupts import CommandInterruptedError, raise_when_interrupted
from experiments.key_values import key_and_value
from experiments.profile_cli import profile_app
from traces.errors import InputError, RopebridgeError

app = typer.Typer(
    name="ropebridge",
    help="Plan, simulate and run the training of one model on unlike devices in several regions.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
traces_app = typer.Typer(help="Read, convert and make traces of link bandwidth.", no_args_is_help=True)
app.add_typer(traces_app, name="traces")
app.add_typer(profile_app, name="profile")

ScenarioArgument = Annotated[str, typer.Argument(metavar="SCENARIO", help="A YAML file, or a ready scenario's name.")]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="A plan file made by 'ropebridge plan'.")]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="Make the plan with: adaptdl, asteroid, asteroid-duplex, auto, cannikin, cloudless, dapple, ddp, deepcee, "
        "gpipe, greedy, hetpipe, lb-bsp, megatron (default), pipedream, zb-h1-equal.",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="Another order of actions: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, compact-zb, portfolio, "
        "optimal.",
    ),
]
DynamicOption = Annotated[bool, typer.Option("--dynamic", help="Each device takes the best action that is ready.")]
OrdersOption = Annotated[
    Path | None, typer.Option("--orders", help="Each worker's actions, in torch.distributed.pipelining's CSV.")
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        help="Adapt the plan as it runs: none, asteroid-replay, auto, cannikin, cloudless, deepcee, depth, "
        "heavy-rescheduling.",
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Training steps.")]
DurationOption = Annotated[
    str | None,
    typer.Option("--duration", help="Simulate until so much time has passed, such as '60 min', instead of --steps."),
]
FolderOption = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write the run into.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print machine-readable results, and nothing else.")]


class EmulatorOption(StrEnum):
    """What `ropebridge run` emulates links with."""

    AUTO = "auto"
    RELAY = "relay"
    SHAPER = "shaper"


class ComputeChoice(StrEnum):
    """What `ropebridge run` computes."""

    PACED = "paced"
    REAL = "real"


@app.command()
def demo(output: FolderOption = None, as_json: JsonOption = False) -> None:
    """Plan, simulate, execute for real on this machine, compare and draw: three regions, four devices."""
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
    from experiments.plan_objective import PlanObjective
    from experiments.scenario_choice import Ordering
    from experiments.verbs.planning import plan as verb

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
    from experiments.scenario_choice import Ordering, choose_plan, choose_scenario
    from experiments.verbs.running import bounded, carry_out, present
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
    steps: StepsOption = 20,
    output: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan for real, a process per device. Example: ropebridge run two-regions --compute paced --emulate-wan."""
    from executor.backend import TorchBackend
    from executor.job import EmulatorChoice
    from experiments.scenario_choice import Ordering, choose_plan, choose_scenario
    from experiments.verbs.resuming import checkpoint_orders, resumed_plan
    from experiments.verbs.running import carry_out, present

    described = choose_scenario(scenario)
    checkpoints, had = checkpoint_orders(checkpoint, checkpoint_every, resume, described, steps, tell)
    chosen: EmulatorChoice = "auto" if emulate_wan else "none"
    if emulator is not None:
        chosen = emulator.value

    def backend(folder: Path | None) -> TorchBackend:
        parameters = folder / "parameters.safetensors" if folder is not None else None
        return TorchBackend(
            compute.value,
            emulator=chosen,
            parameters=parameters,
            resources=folder,
            backup_every=backup_every,
            checkpoints=checkpoints,
            tell=tell,
        )

    ordering = Ordering(schedule, dynamic, orders)
    if had is not None and plan is None and strategy is None:
        planned = resumed_plan(had, described, ordering)
    else:
        planned = choose_plan(described, plan, strategy, ordering)
    record = carry_out(described, planned, policy, steps, output, backend)
    say(present(record, as_json))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders; ratios are against the first.")],
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side, simulated or real. Example: ropebridge compare runs/simulated runs/real."""
    from experiments.verbs.comparing import compare as verb

    say(verb(runs, as_json))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or a folder of them.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The picture, a PNG file.")] = None,
) -> None:
    """Draw runs as a PNG and write a file for ui.perfetto.dev. Example: ropebridge report runs/demo-1."""
    from experiments.verbs.reporting import report as verb

    say(verb(runs, output))


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="What to measure: accuracy, adaptation, executor, fidelity, planner, recovery, schedules, simulator.",
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
    from experiments.bench import bench as verb

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
    from experiments.reproduce import execute_reproduction
    from experiments.reproduce import reproduce as verb

    if execute:
        text, holds = execute_reproduction(name, as_json, output, tell)
    else:
        text, holds = verb(name, quick, as_json, output, tell)
    say(text)
    if not holds:
        raise typer.Exit(1)


@traces_app.command("show")
def traces_show(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace in any format.")],
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG file to draw the rate into.")] = None,
    loops: Annotated[bool, typer.Option("--loop/--hold", help="What follows the end of the trace.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Describe a trace and draw its rate. Example: ropebridge traces show link.csv --plot link.png."""
    from experiments.verbs.traces_verbs import show

    say(show(path, loops=loops, as_json=as_json, plot=plot))


@traces_app.command("convert")
def traces_convert(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="A trace in any format.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="The file to write.")],
    to: Annotated[
        str | None, typer.Option("--to", help="csv, mahimahi, cooked or iperf3; by the suffix if absent.")
    ] = None,
    step: Annotated[str | None, typer.Option("--step", help="Mean rate over windows of this length: '5 s'.")] = None,
) -> None:
    """Write a trace in another format. Example: ropebridge traces convert link.csv link.mahi."""
    from experiments.verbs.traces_verbs import convert
    from traces.units import parse_duration_s

    say(convert(source, target, to=to, step_s=parse_duration_s(step) if step is not None else None))


@traces_app.command("generate")
def traces_generate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A preset (lte, satellite, ...) or a generator.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    duration: Annotated[str, typer.Option("--duration", help="Length, with its unit.")] = "600 s",
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed makes the same trace.")] = 0,
    step: Annotated[str, typer.Option("--step", help="Length of a piece, with its unit.")] = "1 s",
    to: Annotated[
        str | None, typer.Option("--to", help="csv, mahimahi, cooked or iperf3; by the suffix if absent.")
    ] = None,
    parameters: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A generator's parameter, with its unit.")
    ] = None,
) -> None:
    """Make up a trace. Example: ropebridge traces generate lte -o lte.csv --duration '10 min' --seed 7."""
    from experiments.verbs.traces_verbs import generate
    from traces.units import parse_duration_s

    text = generate(
        name,
        output,
        duration_s=parse_duration_s(duration),
        seed=seed,
        step_s=parse_duration_s(step),
        format_name=to,
        parameters=dict(key_and_value(parameter, "mean=10 Mbit/s") for parameter in parameters or []),
    )
    say(text)


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
