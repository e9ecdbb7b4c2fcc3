"""The verb ``ropebridge profile import``: makes a model file from a published profile."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.profiles.model import work_table
from experiments.profiles.model_file import ModelLayers, add_to_model_file
from experiments.runs.console import check_targets
from planner.files.importers.huggingface import model_name, read_huggingface
from planner.files.importers.metis import read_metis
from planner.files.importers.pipedream import read_pipedream
from planner.files.importers.sailor import PRECISION, profiled_models, read_sailor
from traces.common.errors import InputError, unknown_name
from traces.common.text import key_and_value
from traces.common.units import parse_bytes


@dataclass(frozen=True, slots=True)
class ImportConfig:
    """Options of an import, as given on the command line.

    Attributes:
        name: Name for the model; None for the files' own.
        kinds: Kinds of devices to import, each as KIND, or as THEIRS=KIND to rename it.
        samples: Number of samples in the minibatch that PipeDream measured.
        tokens: Number of tokens in a sample of a language model.
        layer_output: Bytes that pass between two layers for a sample, as text with a unit.
    """

    format: str
    files: Sequence[Path]
    name: str | None
    kinds: Sequence[str]
    samples: int | None
    tokens: int | None
    layer_output: str | None


# A model, and remarks about it to print.
_Imported = tuple[ModelLayers, Sequence[str]]


def import_profile(config: ImportConfig, output: Path, as_json: bool) -> str:
    """Read a published profile, write or complete the model file, and return the text to print.

    Raises:
        InputError: A file is missing or damaged, an option is missing or not used by this format, or the model file
            is of another model.
    """
    _refuse_idle_options(config)
    check_targets([output])
    model, notes = _READERS[config.format](config)
    add_to_model_file(output, model)
    layers = model.layers
    if as_json:
        document = {"name": model.name, "file": str(output), "notes": notes}
        return json.dumps({**document, "layers": list(map(asdict, layers))}, indent=2)
    return "\n".join([*work_table(layers), *notes, f"written to {output}: name it as 'model:' of a scenario"])


def _huggingface(config: ImportConfig) -> _Imported:
    path = _only(config, "config.json")
    shape = read_huggingface(path)
    tokens = config.tokens or shape.longest
    if tokens is None:
        raise InputError("the length of a sample is missing", where="--tokens", valid="give a number, such as 1024")
    try:
        layers = shape.layers(tokens)
    except InputError as error:
        raise error.within("--tokens") from None
    tied = "; head and embedding share a table, and each layer holds a copy" if shape.tied else ""
    note = f"{shape.parameters:,} parameters{tied}; samples of {tokens:,} tokens, numbers of 4 bytes"
    return ModelLayers(config.name or model_name(path), layers), (note,)


def _metis(config: ImportConfig) -> _Imported:
    if config.layer_output is None:
        raise InputError(
            "Metis' files do not contain the sizes of the layers' outputs",
            where="--layer-output",
            valid="give tokens x width x bytes of a number, such as '4 MB' for a sample of 1024 tokens of 1024 numbers",
        )
    output_bytes = parse_bytes(config.layer_output, "--layer-output")
    kinds = dict(key_and_value(each, "A100=a100-40", option="--kind") for each in config.kinds)
    model = read_metis(config.files, output_bytes, kinds)
    skipped = [path.name for path in config.files if "_tp1_" not in path.name]
    notes = (f"skipped, measured with tensor parallelism: {', '.join(skipped)}",) if skipped else ()
    return ModelLayers(config.name or model.name, model.layers), notes


def _pipedream(config: ImportConfig) -> _Imported:
    path = _only(config, "graph.txt")
    if config.samples is None:
        raise InputError(
            "PipeDream's file does not say how many samples were measured", where="--samples", valid="give a number"
        )
    if len(config.kinds) != 1:
        raise InputError(
            "PipeDream's file does not name the kind of device", where="--kind", valid="give one kind, such as v100-16"
        )
    model = read_pipedream(path, config.samples, config.kinds[0], config.name or path.resolve().parent.name)
    return ModelLayers(model.name or "pipedream", model.layers), ()


def _sailor(config: ImportConfig) -> _Imported:
    if len(config.files) != 2:
        raise InputError(
            f"{len(config.files)} files are given", where="sailor", valid="give two: layer_times.json layer_sizes.json"
        )
    times, sizes = config.files
    names = profiled_models(times)
    if config.name is None and len(names) != 1:
        raise InputError(
            f"the file holds {len(names)} models", where=str(times), valid=f"say with --name which: {', '.join(names)}"
        )
    name = config.name or names[0]
    if name not in names:
        raise unknown_name("model", name, names, where="--name")
    model = read_sailor(times, sizes, name)
    degrees = ", ".join(map(str, model.sharded))
    notes = (f"skipped: tensor parallelism over {degrees} devices",) if model.sharded else ()
    return ModelLayers(model.name, model.layers, precision=PRECISION), notes


_READERS = {"huggingface": _huggingface, "metis": _metis, "pipedream": _pipedream, "sailor": _sailor}


def _only(config: ImportConfig, what: str) -> Path:
    if len(config.files) != 1:
        raise InputError(f"{len(config.files)} files are given", where=config.format, valid=f"give one {what}")
    return config.files[0]


def _refuse_idle_options(config: ImportConfig) -> None:
    given = {
        "--kind": (bool(config.kinds), ("metis", "pipedream")),
        "--samples": (config.samples is not None, ("pipedream",)),
        "--tokens": (config.tokens is not None, ("huggingface",)),
        "--layer-output": (config.layer_output is not None, ("metis",)),
    }
    for option, (is_given, formats) in given.items():
        if is_given and config.format not in formats:
            problem = f"the format '{config.format}' does not use this option"
            raise InputError(problem, where=option, valid=f"leave it out: it is for {' and '.join(formats)}")
