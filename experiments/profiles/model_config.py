"""The options of ``ropebridge profile model`` and ``profile kind``, checked before torch is loaded."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from executor.validate import check_precision
from experiments.profiles.model_file import refuse_another_model
from experiments.runs.console import check_targets
from planner.files.cluster import read_kind_table
from planner.files.documents import Document, parse_yaml
from planner.files.importers.huggingface import model_name, read_config
from planner.files.parsing import Part
from planner.files.training import read_data
from planner.scenario.scenario import Code, HuggingFaceCode, ModelCode
from planner.scenario.training import OPTIMIZER_STATES, TrainingData
from traces.common.errors import InputError, find_by_name
from traces.common.text import key_and_value

# Torch's device on which tensors have shapes but no data.
META = "meta"


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """Options of a measurement, as given on the command line.

    Attributes:
        arguments: Arguments of the model's function ``build``, each as KEY=VALUE.
        kind: Name for the kind of device; None for ``cpu`` or the GPU's own name.
        device: ``cpu`` or ``cuda``, or ``meta`` to count operations instead.
        ranks: Number of ranks of this machine that compute at once, this one included.
        threads: Number of CPU threads; 0 for a rank's share of the cores.
        samples: Microbatch sizes, separated by commas.
        split: Whether to measure the two parts of a split backward.
        data: A YAML file that names the data, as ``data`` of a scenario's ``training``; None for the model's own data.
        tokens: Tokens of a sample of a model of transformers, whose ``code`` is a ``config.json``; otherwise None.
    """

    code: Path
    arguments: Sequence[str]
    kind: str | None
    device: str
    ranks: int
    threads: int
    samples: str
    repeats: int
    optimizer: str
    precision: str
    split: bool
    data: Path | None = None
    tokens: int | None = None

    @property
    def name(self) -> str:
        """The name of the model: that of its file, or of the folder of its ``config.json``."""
        return self.code.stem if self.tokens is None else model_name(self.code)

    @property
    def measured_precision(self) -> str | None:
        """The precision of the sizes and times; None if operations are counted, which are the same in all of them."""
        return None if self.device == META else self.precision


def check_config(config: ProfileConfig, output: Path) -> None:
    """Check that a model can be measured with these options and its model file written.

    Raises:
        InputError: An option is wrong; the message names the first such option.
    """
    path = config.code
    is_config = path.suffix == ".json"
    if is_config and (config.tokens is None or config.device == META):
        advice = f"'--tokens N' measures a config.json; 'ropebridge profile import huggingface {path} -o FILE' counts"
        raise InputError("this is no Python file", where=str(path), valid=advice)
    if config.tokens is not None and (not is_config or config.arguments):
        raise InputError(
            "the tokens of a sample are those of a config.json without arguments",
            where=f"--tokens {config.tokens}",
            valid="give a config.json, or the model's own arguments by '--set'",
        )
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), valid="give a Python file with a function 'build'")
    rising_numbers(config.samples, "--samples")
    arguments_of(config)
    find_by_name(config.optimizer, OPTIMIZER_STATES, "optimizer")
    check_precision(config.precision, "--precision")
    named_data(config)
    if config.ranks > 1 and config.device != "cpu":
        where = f"--ranks {config.ranks} --device {config.device}"
        problem, advice = "only ranks on a CPU share their device", "leave --ranks out: each rank has a GPU of its own"
        raise InputError(problem, where=where, valid=advice)
    check_targets([output])
    refuse_another_model(output, config.name, code_of(config), precision=config.measured_precision)


@dataclass(frozen=True, slots=True)
class KindConfig:
    """Options of a measurement of a device, as given on the command line.

    Attributes:
        kind: Name for the kind of device; None for ``cpu`` or the GPU's own name.
        device: ``cpu`` or ``cuda``.
        threads: Number of CPU threads; 0 for all cores.
        limit_s: Time for the measurement, seconds.
    """

    kind: str | None
    device: str
    precision: str
    threads: int
    limit_s: float


def check_kind_config(config: KindConfig, output: Path) -> None:
    """Check that a device can be measured with these options and its table written.

    Raises:
        InputError: An option is wrong, or there is something else in the file.
    """
    check_precision(config.precision, "--precision")
    if config.limit_s <= 0:
        raise InputError("there is no time to measure", where="--limit", valid="give a time such as '2 min'")
    check_targets([output])
    if not output.exists():
        return
    try:
        read_kind_table(output)
    except InputError:
        raise InputError(
            "there is something else than a table of a kind in this file",
            where=str(output),
            valid="choose another file, or remove this one",
        ) from None


def rising_numbers(text: str, option: str, most: int = sys.maxsize) -> list[int]:
    """Parse the rising whole numbers, separated by commas, of a command-line option.

    Raises:
        InputError: The text is anything else, or a number is not from 1 to ``most``.
    """
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > most or found != sorted(set(found)):
        limit = f" up to {most}" if most < sys.maxsize else ""
        valid = f"give rising whole numbers{limit}, such as '1,2,4,8'"
        raise InputError(f"'{text}' is no list of rising numbers", where=option, valid=valid)
    return found


def named_data(config: ProfileConfig) -> TrainingData | None:
    """Return the data that the option ``--data`` names; raise `InputError` if its file is wrong."""
    return None if config.data is None else read_data(Part(Document(config.data)))


def code_of(config: ProfileConfig) -> Code:
    """Return the model's file with its arguments, or its configuration; raise `InputError` if either is wrong."""
    if config.tokens is None:
        return ModelCode(config.code, arguments_of(config))
    return HuggingFaceCode(config.code.resolve(), read_config(config.code), config.tokens)


def arguments_of(config: ProfileConfig) -> dict[str, int | float | str | bool]:
    """Return the arguments of ``build``, by name.

    Raises:
        InputError: An argument has no value.
    """
    return dict(map(_argument, config.arguments))


def _argument(text: str) -> tuple[str, int | float | str | bool]:
    key, value = key_and_value(text, "width=64")
    try:
        read = parse_yaml(value)
    except (yaml.YAMLError, RecursionError, ValueError):
        read = None
    if not isinstance(read, int | float | str | bool):
        raise InputError(f"'{text}' is no assignment", where="--set", valid="write KEY=VALUE, for example 'width=64'")
    return key, read
