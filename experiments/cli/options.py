"""Arguments and options that verbs share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print machine-readable results, and nothing else.")]
FolderOption = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write the run into.")]
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


class EmulatorOption(StrEnum):
    """What `ropebridge run` emulates links with."""

    AUTO = "auto"
    RELAY = "relay"
    SHAPER = "shaper"


class ComputeChoice(StrEnum):
    """What `ropebridge run` computes."""

    PACED = "paced"
    REAL = "real"
