"""The verbs of ``ropebridge traces``."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import JsonOption
from experiments.runs.console import say, tell
from traces.common.text import key_and_value

traces_app = typer.Typer(help="Read, convert, make and record traces of link bandwidth.", no_args_is_help=True)


@traces_app.command("show")
def traces_show(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace in any format.")],
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG file to draw the rate into.")] = None,
    loops: Annotated[bool, typer.Option("--loop/--hold", help="What follows the end of the trace.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Describe a trace and draw its rate. Example: ropebridge traces show link.csv --plot link.png."""
    from experiments.verbs.traces import show

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
    from experiments.verbs.traces import convert
    from traces.common.units import parse_duration_s

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
    from experiments.verbs.traces import generate
    from traces.common.units import parse_duration_s

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


@traces_app.command("record")
def traces_record(
    address: Annotated[
        str, typer.Argument(metavar="HOST[:PORT]", help="Where 'ropebridge profile network --listen' runs.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace, CSV; one that is there goes on.")],
    every: Annotated[str, typer.Option("--every", help="From one sample to the next, with its unit.")] = "10 s",
    traffic: Annotated[str, typer.Option("--traffic", help="Bytes of each sample at most, with their unit.")] = "2 MB",
    connections: Annotated[
        int, typer.Option("--connections", help="Over which a sample goes: what the link carries, not one connection.")
    ] = 4,
    reverse: Annotated[bool, typer.Option("--reverse", help="Record the way from there to here.")] = False,
    duration: Annotated[
        str | None, typer.Option("--duration", help="How long, with its unit; until Ctrl-C if absent.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Sample a live path to a trace. Example: ropebridge traces record 10.0.0.5 -o link.csv --every '10 s'."""
    from experiments.verbs.traces import record

    text = record(
        address,
        output,
        every=every,
        traffic=traffic,
        connections=connections,
        reverse=reverse,
        duration=duration,
        as_json=as_json,
        tell=tell,
    )
    say(text)
