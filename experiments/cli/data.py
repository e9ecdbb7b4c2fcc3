"""The verbs that make data: `traces ...` for link rates over time, `profile ...` for costs of models and networks."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import MOST, MOST_PROCESSES, JsonOption, ScenarioArgument, TraceFormatOption
from experiments.runs.console import say, tell
from traces.common.text import key_and_value

traces_app = typer.Typer(help="Read, convert, make and record traces of link bandwidth.", no_args_is_help=True)


@traces_app.command("show")
def traces_show(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace in any format.")],
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG file to draw the rate into.")] = None,
    loops: Annotated[bool, typer.Option("--loop/--hold", help="Behaviour after the end of the trace.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Describe a trace and draw its rate. Example: ropebridge traces show link.csv --plot link.png."""
    from experiments.verbs.traces import show

    say(show(path, loops=loops, as_json=as_json, plot=plot))


@traces_app.command("convert")
def traces_convert(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="A trace in any format.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="The file to write.")],
    to: TraceFormatOption = None,
    step: Annotated[str | None, typer.Option("--step", help="Mean rates over windows of this length: '5 s'.")] = None,
) -> None:
    """Write a trace in another format. Example: ropebridge traces convert link.csv link.mahi."""
    from experiments.verbs.traces import convert
    from traces.common.units import parse_duration_s

    say(convert(source, target, to=to, step_s=parse_duration_s(step, "--step") if step is not None else None))


@traces_app.command("generate")
def traces_generate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A preset (lte, satellite, ...) or a generator.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    duration: Annotated[str, typer.Option(help="Length of the trace, with its unit.")] = "600 s",
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Seed; equal seeds make equal traces.")] = 0,
    step: Annotated[str, typer.Option(help="Length of each interval, with its unit.")] = "1 s",
    to: TraceFormatOption = None,
    parameters: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A generator's parameter, with its unit.")
    ] = None,
) -> None:
    """Generate a trace. Example: ropebridge traces generate lte -o lte.csv --duration '10 min' --seed 7."""
    from experiments.verbs.traces import generate
    from traces.common.units import parse_duration_s

    given = dict(key_and_value(parameter, "mean=10 Mbit/s") for parameter in parameters or [])
    duration_s, step_s = parse_duration_s(duration, "--duration"), parse_duration_s(step, "--step")
    say(generate(name, output, to, given, duration_s=duration_s, seed=seed, step_s=step_s))


@traces_app.command("record")
def traces_record(
    address: Annotated[
        str, typer.Argument(metavar="HOST[:PORT]", help="Where 'ropebridge profile network --listen' runs.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace, CSV; an existing one is continued.")],
    every: Annotated[str, typer.Option(help="Time from one sample to the next, with its unit.")] = "10 s",
    traffic: Annotated[str, typer.Option(help="Most bytes of each sample, with their unit.")] = "2 MB",
    connections: Annotated[int, typer.Option(help="Connections of a sample; several fill the link.")] = 4,
    reverse: Annotated[bool, typer.Option("--reverse", help="Record the direction towards this host.")] = False,
    duration: Annotated[str | None, typer.Option(help="Duration, with its unit; until Ctrl-C if absent.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Record a path's rates as a trace. Example: ropebridge traces record 10.0.0.5 -o link.csv --every '10 s'."""
    from experiments.verbs.traces import record
    from planner.scenario.effects import TCP_PAYLOAD_EFFICIENCY
    from traces.common.units import parse_bytes, parse_duration_s
    from traces.probe.conversation import parse_address
    from traces.probe.recorder import RecordingConfig

    config = RecordingConfig(
        parse_address(address),
        "back" if reverse else "there",
        parse_duration_s(every, "--every"),
        parse_bytes(traffic, "--traffic"),
        connections,
        TCP_PAYLOAD_EFFICIENCY,
        math.inf if duration is None else parse_duration_s(duration, "--duration"),
    )
    say(record(config, output, as_json, tell))


profile_app = typer.Typer(help="Profile models and networks for planning.", no_args_is_help=True)


MeasuredChoice = StrEnum("MeasuredChoice", ["CPU", "CUDA"])
DeviceChoice = StrEnum("DeviceChoice", ["CPU", "CUDA", "META"])
FormatChoice = StrEnum("FormatChoice", ["HUGGINGFACE", "METIS", "PIPEDREAM", "SAILOR"])


@profile_app.command("model")
def model(
    code: Annotated[Path, typer.Argument(metavar="MODEL.py", help="A file with a function 'build', or a config.json.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file; times of other kinds stay in it.")],
    arguments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of 'build'.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="Name for this kind of device.", show_default="cpu")] = None,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where to compute; meta counts operations and measures nothing.")
    ] = DeviceChoice.CPU,
    ranks: Annotated[
        int, typer.Option(min=1, max=MOST_PROCESSES, help="Ranks of this machine that will compute at once.")
    ] = 1,
    threads: Annotated[
        int, typer.Option(min=0, max=MOST_PROCESSES, help="CPU threads; 0 for a rank's share of the cores.")
    ] = 0,
    samples: Annotated[str, typer.Option(help="Rising microbatch sizes to measure.")] = "1,2,4,8",
    repeats: Annotated[int, typer.Option(min=1, max=MOST, help="Measurements in each of six rounds.")] = 5,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adamw.")] = "sgd",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    split: Annotated[bool, typer.Option("--split", help="Measure a split backward, as for zb-h1.")] = False,
    data: Annotated[Path | None, typer.Option(help="A YAML file with the value of 'training: {data: ...}'.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, max=MOST, help="config.json: tokens of a sample.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's layers on this device. Example: ropebridge profile model gpt.py --set width=64 -o gpt.yaml."""
    from experiments.profiles.model_config import ProfileConfig, check_config

    config = ProfileConfig(
        code,
        arguments or [],
        kind,
        device.value,
        ranks,
        threads,
        samples,
        repeats,
        optimizer,
        precision,
        split,
        data,
        tokens,
    )
    check_config(config, output)
    from experiments.profiles.model import profile

    say(profile(config, output, as_json, tell))


@profile_app.command("kind")
def kind(
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the table, which is replaced.")],
    kind: Annotated[str | None, typer.Option(help="Name for this kind of device.", show_default="cpu")] = None,
    device: Annotated[MeasuredChoice, typer.Option(help="The device to measure.")] = MeasuredChoice.CPU,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    threads: Annotated[int, typer.Option(min=0, max=MOST_PROCESSES, help="CPU threads; 0 for all cores.")] = 0,
    limit: Annotated[str, typer.Option(help="Longest time to measure; with less, fewer shapes.")] = "2 min",
    as_json: JsonOption = False,
) -> None:
    """Measure this device's matrix products by shape. Example: ropebridge profile kind --kind my-box -o my-box.yaml."""
    from experiments.profiles.model_config import KindConfig, check_kind_config
    from traces.common.units import parse_duration_s

    config = KindConfig(kind, device.value, precision, threads, parse_duration_s(limit, "--limit"))
    check_kind_config(config, output)
    from experiments.profiles.kind import profile_kind

    say(profile_kind(config, output, as_json=as_json, tell=tell))


@profile_app.command("convergence")
def convergence(
    scenario: ScenarioArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for runs and law; runs that it has are not repeated.")
    ],
    methods: Annotated[str, typer.Option(help="Methods beside allreduce.")] = "diloco,diloco-streaming",
    workers: Annotated[str, typer.Option(help="Rising numbers of workers.")] = "2,4",
    intervals: Annotated[str, typer.Option(help="Rising steps between two exchanges.")] = "5,20,50",
    compressions: Annotated[str, typer.Option(help="Formats of what is exchanged.")] = "none",
    momenta: Annotated[str, typer.Option(help="Momenta of outer steps; 0 averages the workers.")] = "0.9,0",
    steps: Annotated[int, typer.Option(min=4, max=100_000, help="Steps of each run.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds of each setting.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Measure what rare exchanges cost in loss. Example: ropebridge profile convergence gpt.yaml -o loss.json."""
    from experiments.profiles.convergence import ConvergenceConfig, profile_convergence

    config = ConvergenceConfig(scenario, methods, workers, intervals, compressions, momenta, steps, seeds)
    say(profile_convergence(config, output, as_json, tell))


@profile_app.command("import")
def import_(
    format_: Annotated[FormatChoice, typer.Argument(metavar="FORMAT", help="huggingface, metis, pipedream or sailor.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="config.json, DeviceType.*.json, graph.txt, times sizes.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file; times of other kinds stay in it.")],
    name: Annotated[str | None, typer.Option(help="The model's name; selects one of several in a file.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="[THEIRS=]KIND", help="Kind of device; metis: THEIRS=OURS."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="pipedream: samples of the measured minibatch.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, max=MOST, help="huggingface: tokens of a sample.")] = None,
    output_size: Annotated[
        str | None, typer.Option("--layer-output", help="metis: bytes between layers for a sample, such as '4 MB'.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a published profile. Example: ropebridge profile import huggingface config.json -o model.yaml."""
    from experiments.profiles.importing import ImportConfig, import_profile

    config = ImportConfig(format_.value, files, name, kind or [], samples, tokens, output_size)
    say(import_profile(config, output, as_json))


@profile_app.command("network")
def network(
    address: Annotated[
        str | None, typer.Argument(metavar="HOST[:PORT]", help="The other host, on which '--listen' runs.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="ADDRESS[:PORT]", help="Serve measurements at this address of this host."),
    ] = None,
    names: Annotated[
        str | None, typer.Option("--names", metavar="HERE,THERE", help="Names of the two ends in the cluster file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Cluster file; its other content stays.")
    ] = None,
    connections: Annotated[str, typer.Option(help="Rising numbers of connections.")] = "1,2,4,8",
    traffic: Annotated[str, typer.Option(help="Most bytes of all bursts, with their unit.")] = "2 GB",
    as_json: JsonOption = False,
) -> None:
    """Measure the path to another host. Example: ropebridge profile network 10.0.0.5 --names a,b -o cluster.yaml."""
    from experiments.profiles.network import NetworkConfig, listen_at, profile_network
    from traces.common.units import parse_bytes

    if listen is not None:
        listen_at(listen, address, tell)
        return
    config = NetworkConfig(address, names, connections, parse_bytes(traffic, "--traffic"), output)
    say(profile_network(config, as_json, tell))
