"""The verbs `ropebridge profile ...`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from experiments.console import say, tell

profile_app = typer.Typer(help="Measure what plans are made from.", no_args_is_help=True)


class DeviceChoice(StrEnum):
    """Where `ropebridge profile model` computes."""

    CPU = "cpu"
    CUDA = "cuda"


@profile_app.command("model")
def model(
    code: Annotated[Path, typer.Argument(metavar="MODEL.py", help="A file with a function 'build'.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file; what it has of other kinds stays.")],
    arguments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of 'build'.")
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Of device, a name.", show_default="cpu")] = None,
    device: Annotated[DeviceChoice, typer.Option("--device", help="Where to compute.")] = DeviceChoice.CPU,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Of the CPU; 0 for one a core.")] = 0,
    samples: Annotated[str, typer.Option("--samples", help="Sizes of microbatches, rising.")] = "1,2,4,8",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="In each of six rounds.")] = 5,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, momentum or adamw.")] = "sgd",
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16-mixed.")] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable results, and nothing else.")] = False,
) -> None:
    """Measure a model's layers on this device. Example: ropebridge profile model gpt.py --set width=64 -o gpt.yaml."""
    from experiments.verbs.profiling import ProfileOrders, profile

    orders = ProfileOrders(code, arguments or [], kind, device.value, threads, samples, repeats, optimizer, precision)
    say(profile(orders, output, as_json, tell))
