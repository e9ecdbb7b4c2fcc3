"""The verbs `ropebridge profile ...`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import JsonOption
from experiments.runs.console import say, tell

profile_app = typer.Typer(help="Measure what plans are made from.", no_args_is_help=True)


class DeviceChoice(StrEnum):
    """Where `ropebridge profile model` computes."""

    CPU = "cpu"
    CUDA = "cuda"
    META = "meta"


class FormatChoice(StrEnum):
    """What `ropebridge profile import` reads."""

    HUGGINGFACE = "huggingface"
    METIS = "metis"
    PIPEDREAM = "pipedream"
    SAILOR = "sailor"


@profile_app.command("model")
def model(
    code: Annotated[Path, typer.Argument(metavar="MODEL.py", help="A file with a function 'build'.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file; what it has of other kinds stays.")],
    arguments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of 'build'.")
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Of device, a name.", show_default="cpu")] = None,
    device: Annotated[
        DeviceChoice, typer.Option("--device", help="Where to compute; meta counts operations and measures nothing.")
    ] = DeviceChoice.CPU,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Of this machine that will compute at once.")] = 1,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Of the CPU; 0 for a rank's share of cores.")] = 0,
    samples: Annotated[str, typer.Option("--samples", help="Sizes of microbatches, rising.")] = "1,2,4,8",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="In each of six rounds.")] = 5,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, momentum or adamw.")] = "sgd",
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16-mixed.")] = "fp32",
    split: Annotated[bool, typer.Option("--split", help="For schedules that split backward, as zb-h1.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's layers on this device. Example: ropebridge profile model gpt.py --set width=64 -o gpt.yaml."""
    from experiments.profiles.orders import ProfileConfig, check_orders

    orders = ProfileConfig(
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
    )
    check_orders(orders, output)
    from experiments.profiles.model import profile

    say(profile(orders, output, as_json, tell))


@profile_app.command("import")
def import_(
    format_: Annotated[FormatChoice, typer.Argument(metavar="FORMAT", help="huggingface, metis, pipedream or sailor.")],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="config.json, DeviceType.*.json, graph.txt, times sizes."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file; what it has of other kinds stays.")],
    name: Annotated[str | None, typer.Option("--name", help="Of the model; of several in a file, which one.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="[THEIRS=]KIND", help="Of device: pipedream's; metis' names to ours."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="pipedream: of the minibatch measured.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="huggingface: of a sample.")] = None,
    output_size: Annotated[
        str | None, typer.Option("--layer-output", help="metis: what passes between layers for a sample, as '4 MB'.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Take over a published profile. Example: ropebridge profile import huggingface config.json -o model.yaml."""
    from experiments.profiles.importing import ImportConfig, import_profile

    say(
        import_profile(
            ImportConfig(format_.value, files, name, kind or [], samples, tokens, output_size), output, as_json
        )
    )


@profile_app.command("network")
def network(
    address: Annotated[
        str | None, typer.Argument(metavar="HOST[:PORT]", help="The other host, on which '--listen' runs.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="ADDRESS[:PORT]", help="Serve who measures, at this address of this host."),
    ] = None,
    names: Annotated[
        str | None, typer.Option("--names", metavar="HERE,THERE", help="Of the two ends, in the cluster file.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Cluster file; what else it has stays.")] = None,
    connections: Annotated[str, typer.Option("--connections", help="Numbers of them, rising.")] = "1,2,4,8",
    traffic: Annotated[str, typer.Option("--traffic", help="Bytes of all bursts at most, with their unit.")] = "2 GB",
    as_json: JsonOption = False,
) -> None:
    """Measure the path to another host. Example: ropebridge profile network 10.0.0.5 --names a,b -o cluster.yaml."""
    from experiments.profiles.network import NetworkConfig, listen_at, profile_network
    from traces.common.units import parse_bytes

    if listen is not None:
        listen_at(listen, address, tell)
        return
    orders = NetworkConfig(address, names, connections, parse_bytes(traffic), output)
    say(profile_network(orders, as_json, tell))
