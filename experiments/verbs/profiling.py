"""``ropebridge profile model``: what it does; returns the text to print."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml

from executor.compute_device import CPU, threads_of_a_rank
from executor.model import load_with_sizes
from executor.model_profile import CONFIDENCE, LayerCosts, profile_model
from experiments.key_values import key_and_value
from planner.files.model_file import add_to_model_file
from planner.profile import LayerProfile, TimeTable
from planner.scenario import ELEMENT_BYTES, OPTIMIZER_STATES, ModelCode, Optimizer, Training
from traces.errors import InputError
from traces.naming import find_by_name


@dataclass(frozen=True, slots=True)
class ProfileOrders:
    """What to measure, as the command was told.

    Attributes:
        code: The model's file.
        arguments: Of its ``build``, each as KEY=VALUE.
        kind: Name for the kind of device; None for the usual one.
        device: ``cpu`` or ``cuda``.
        threads: Of the CPU; 0 for one a core.
        samples: Sizes of microbatches, with commas.
        repeats: In each round.
        optimizer: Name of the update rule.
        precision: What layers compute in.
    """

    code: Path
    arguments: Sequence[str]
    kind: str | None
    device: str
    threads: int
    samples: str
    repeats: int
    optimizer: str
    precision: str


def profile(orders: ProfileOrders, output: Path, as_json: bool, tell: Callable[[str], None]) -> str:
    """Measure, and write or complete the model file.

    Args:
        orders: What.
        output: The model file.
        as_json: Whether to return JSON, in SI units, instead of a table.
        tell: Called with lines about the progress.

    Raises:
        InputError: The model cannot be built, an option makes no sense, or the file is of another model.
    """
    samples = _samples(orders.samples)
    find_by_name(orders.optimizer, OPTIMIZER_STATES, "optimizer")
    find_by_name(orders.precision, ELEMENT_BYTES, "precision")
    device, kind = _device(orders)
    code = ModelCode(orders.code, dict(map(_argument, orders.arguments)))
    training = Training(max(samples), optimizer=Optimizer(orders.optimizer), precision=orders.precision)
    torch.set_num_threads(orders.threads or threads_of_a_rank(1))
    loaded = load_with_sizes(code, training.seed)
    costs = profile_model(loaded, samples, training, orders.repeats, device, tell)
    add_to_model_file(output, orders.code.stem, code, [_layer(each, kind) for each in costs])
    if as_json:
        document = {"kind": kind, "file": str(output), "confidence": CONFIDENCE, "layers": list(map(asdict, costs))}
        return json.dumps(document, indent=2)
    return "\n".join([*_table(costs, max(samples)), f"written to {output}: name it as 'model:' of a scenario"])


def _samples(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or found[0] < 1 or found != sorted(set(found)):
        raise InputError(f"'{text}'", where="--samples", valid="give rising whole numbers, such as '1,2,4,8'")
    return found


def _argument(text: str) -> tuple[str, int | float | str | bool]:
    key, value = key_and_value(text, "width=64")
    read = yaml.safe_load(value)
    if not isinstance(read, int | float | str | bool):
        raise InputError(f"'{text}' sets nothing", where="--set", valid="write KEY=VALUE, for example 'width=64'")
    return key, read


def _device(orders: ProfileOrders) -> tuple[torch.device, str]:
    if orders.device == "cpu":
        return CPU, orders.kind or "cpu"
    if not torch.cuda.is_available():
        raise InputError("torch finds no GPU here", where="--device", valid="'cpu'")
    return torch.device("cuda", 0), orders.kind or torch.cuda.get_device_name(0)


def _layer(costs: LayerCosts, kind: str) -> LayerProfile:
    times = costs.times.values()
    table = TimeTable(
        tuple(costs.times),
        tuple(each.forward.median_s for each in times),
        tuple(each.backward_input.median_s for each in times),
        tuple(each.backward_weight.median_s for each in times),
    )
    return LayerProfile(costs.name, costs.parameter_bytes, costs.output_bytes, costs.activation_bytes, {kind: table})


def _table(costs: Sequence[LayerCosts], samples: int) -> list[str]:
    names = ("forward", "backward_input", "backward_weight")
    width = max(len(each.name) for each in costs)
    lines = [
        f"{samples} samples, milliseconds; least and most of six rounds, which hold the median with {CONFIDENCE:.0%}",
        f"{'layer':{width}}  {'parameters':>12} {'kept a sample':>13}  " + "  ".join(f"{each:^24}" for each in names),
    ]
    for each in costs:
        cells = []
        for name in names:
            time = getattr(each.times[samples], name)
            cells.append(f"{1000 * time.median_s:8.3f} ({1000 * time.least_s:.3f}-{1000 * time.most_s:.3f})")
        sizes = f"{each.parameter_bytes / 1e3:9.1f} kB {each.activation_bytes / 1e3:10.1f} kB"
        lines.append(f"{each.name:{width}}  {sizes}  " + "  ".join(f"{cell:24}" for cell in cells))
    return lines
