"""What ``ropebridge profile model`` is told; what is wrong in it is found before torch is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from experiments.profiles.model_file import refuse_another_model
from experiments.runs.console import check_targets
from planner.scenario.scenario import ModelCode
from planner.scenario.training import ELEMENT_BYTES, OPTIMIZER_STATES
from traces.common.errors import InputError, find_by_name
from traces.common.text import key_and_value

# Where torch only works out shapes.
META = "meta"


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """What to measure, as the command was told.

    Attributes:
        code: The model's file.
        arguments: Of its ``build``, each as KEY=VALUE.
        kind: Name for the kind of device; None for the usual one.
        device: ``cpu`` or ``cuda``, or ``meta`` to count operations instead.
        ranks: Of this machine that compute at once; this one is among them.
        threads: Of the CPU; 0 for a rank's share of the cores.
        samples: Sizes of microbatches, with commas.
        repeats: In each round.
        optimizer: Name of the update rule.
        precision: What layers compute in.
        split: Whether the gradients' times are those of backwards that are split.
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


def check_orders(orders: ProfileConfig, output: Path) -> None:
    """Refuse what makes no sense.

    Args:
        orders: What to measure.
        output: The file to write.

    Raises:
        InputError: The first thing that is wrong.
    """
    path = orders.code
    if path.suffix == ".json":
        advice = f"for a model's config.json there is 'ropebridge profile import huggingface {path} -o FILE'"
        raise InputError("this is no Python file", where=str(path), valid=advice)
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), valid="give a Python file with a function 'build'")
    sample_counts(orders)
    arguments_of(orders)
    find_by_name(orders.optimizer, OPTIMIZER_STATES, "optimizer")
    find_by_name(orders.precision, ELEMENT_BYTES, "precision")
    if orders.ranks > 1 and orders.device != "cpu":
        where = f"--ranks {orders.ranks} --device {orders.device}"
        raise InputError("only ranks on a CPU share it", where=where, valid="leave --ranks out: ranks have GPUs alone")
    check_targets([output])
    refuse_another_model(output, path.stem, ModelCode(path, arguments_of(orders)))


def sample_counts(orders: ProfileConfig) -> list[int]:
    """Return the sizes of microbatches.

    Raises:
        InputError: They are no rising whole numbers.
    """
    try:
        found = [int(each) for each in orders.samples.split(",")]
    except ValueError:
        found = []
    if not found or found[0] < 1 or found != sorted(set(found)):
        raise InputError(f"'{orders.samples}'", where="--samples", valid="give rising whole numbers, such as '1,2,4,8'")
    return found


def arguments_of(orders: ProfileConfig) -> dict[str, int | float | str | bool]:
    """Return what ``build`` is called with.

    Raises:
        InputError: One sets nothing.
    """
    return dict(map(_argument, orders.arguments))


def _argument(text: str) -> tuple[str, int | float | str | bool]:
    key, value = key_and_value(text, "width=64")
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        read = None
    if not isinstance(read, int | float | str | bool):
        raise InputError(f"'{text}' sets nothing", where="--set", valid="write KEY=VALUE, for example 'width=64'")
    return key, read
