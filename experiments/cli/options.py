"""Arguments and options that several verbs share, and the names that shells complete.

Names are repeated here because the modules that define them take a second to load; a test compares them.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from experiments.scenarios import ready_scenarios

# The first strategy is the default.
STRATEGIES = (
    *("auto", "asteroid", "asteroid-duplex", "cannikin", "cloudless", "deepcee"),
    *("adaptdl", "dapple", "ddp", "gpipe", "greedy", "hetpipe", "lb-bsp", "megatron", "pipedream", "zb-h1-equal"),
)
SCHEDULES = (*("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v"), *("compact-zb", "portfolio", "optimal"))
POLICIES = (
    *("none", "auto", "depth", "deepcee", "cannikin", "cloudless"),
    *("asteroid-replay", "heavy-rescheduling", "streaming"),
)
# Strategies whose plans a backtest compares policies with. All sum gradients in every step, as policies need it.
RIVALS = ("auto", "deepcee", "asteroid", "megatron", "pipedream")
# Largest numbers that options take: more overflows somewhere, or starts more than any machine can run.
MOST, MOST_PROCESSES = 10**12, 4096
TARGETS = ("torchrun", "ssh", "slurm", "kubernetes", "skypilot")


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a shell completion function that offers these names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def _complete_scenario(incomplete: str) -> list[str]:
    return one_of(ready_scenarios())(incomplete)


class EmulatorOption(StrEnum):
    """Program that emulates links in `ropebridge run`."""

    AUTO = "auto"
    RELAY = "relay"
    SHAPER = "shaper"


class ComputeChoice(StrEnum):
    """Kind of compute in `ropebridge run`."""

    PACED = "paced"
    REAL = "real"


JsonOption = Annotated[bool, typer.Option("--json", help="Print machine-readable results, and nothing else.")]
FolderOption = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write the run into.")]
ScenarioArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO", help="A YAML file, or a ready scenario's name.", autocompletion=_complete_scenario
    ),
]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="A plan file made by 'ropebridge plan'.")]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help=f"Make the plan with: {', '.join(STRATEGIES)}; or a Python file.",
        show_default=STRATEGIES[0],
        autocompletion=one_of(STRATEGIES),
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help=f"Another order of actions: {', '.join(SCHEDULES)}.",
        show_default="the strategy's",
        autocompletion=one_of(SCHEDULES),
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
        help=f"Adapt the plan as it runs: {', '.join(POLICIES)}; or a Python file.",
        autocompletion=one_of(POLICIES),
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, max=MOST, help="Number of training steps.")]
ComputeOption = Annotated[
    ComputeChoice, typer.Option("--compute", help="Train the model, or move its bytes at the profile's pace.")
]
AllowNanOption = Annotated[
    bool, typer.Option("--allow-nan", help="Train on if the loss or a parameter is NaN or infinite; else the run ends.")
]
OnThisDeviceOption = Annotated[
    bool,
    typer.Option(
        "--on-this-device", help="Train also on devices of other kinds than the plan names, and on fewer GPUs."
    ),
]
BackupOption = Annotated[
    int,
    typer.Option(
        "--backup-every",
        min=0,
        max=MOST,
        help="Steps between copies of the state, from which a run goes on without lost ranks.",
    ),
]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every", min=1, max=MOST, help="Steps from one checkpoint to the next.", show_default="10"
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the newest complete checkpoint, with the plan that it had, unless another is given.",
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        help="Engine that carries out points: local, slurm, dask.",
        autocompletion=one_of(("local", "slurm", "dask")),
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        max=MOST_PROCESSES,
        help="Number of points at a time.",
        show_default="this machine's cores",
    ),
]
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Carry out failed points again.")]
TraceFormatOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        help="csv, mahimahi, cooked or iperf3.",
        show_default="by the suffix",
        autocompletion=one_of(("csv", "mahimahi", "cooked", "iperf3")),
    ),
]
