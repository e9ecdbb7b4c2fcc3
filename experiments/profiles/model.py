"""The verb ``ropebridge profile model``: measures the layers of a model on this machine and writes its model file."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import torch

from executor.profiling.background_load import LoadConfig, background_load
from executor.profiling.model_profile import LayerCosts, ModelCosts, count_work, profile_model, profiling_steps
from executor.training.device import CPU, cpu_name, is_kind, keep_freed_memory, threads_of_a_rank
from executor.training.models.loading import LoadedModel, load_with_sizes
from experiments.profiles.model_config import META, ProfileConfig, arguments_of, code_of, named_data, rising_numbers
from experiments.profiles.model_file import ModelLayers, add_to_model_file, refuse_another_model
from experiments.runs.progress import showing_rounds
from planner.scenario.profile import LayerProfile, TimeTable
from planner.scenario.roofline import LayerWork
from planner.scenario.scenario import ModelCode
from planner.scenario.training import Optimizer, Training
from traces.common.errors import InputError
from traces.common.units import size_text
from traces.statistics import CONFIDENCE, Interval


def work_table(layers: Sequence[LayerProfile | LayerWork]) -> list[str]:
    """Return the lines of a table with each layer's bytes, and its operations or times.

    Consecutive layers that are equal share a line.
    """
    width = max(len(layer.name) for layer in layers) + 6
    lines = [f"{'layer':{width}} {'parameters':>12} {'output':>12} {'kept a sample':>14}  forward"]
    for _, group in groupby(layers, key=_content):
        equal = list(group)
        name = equal[0].name if len(equal) == 1 else f"{equal[0].name} x {len(equal)}"
        sizes = (equal[0].parameter_bytes, equal[0].output_bytes, equal[0].activation_bytes)
        one, two, three = map(size_text, sizes)
        lines.append(f"{name:{width}} {one:>12} {two:>12} {three:>14}  {_forward(equal[0])}")
    return lines


def _content(layer: LayerProfile | LayerWork) -> tuple[object, ...]:
    work = layer.forward_flop if isinstance(layer, LayerWork) else None
    return (layer.name, layer.parameter_bytes, layer.output_bytes, work)


def _forward(layer: LayerProfile | LayerWork) -> str:
    if isinstance(layer, LayerWork):
        return f"{layer.forward_flop / 1e9:.4g} GFLOP a sample"
    rows = [
        f"{1000 * table.forward_s[-1]:.3f} ms of {table.samples[-1]} on {kind}" for kind, table in layer.times.items()
    ]
    return ", ".join(rows)


# Significant digits of a time in the model file; further digits differ from run to run.
_DIGITS = 5

# Slowest rounds that take longer than this many times the quickest are reported.
_STEADY = 3


def profile(config: ProfileConfig, output: Path, as_json: bool, tell: Callable[[str], None]) -> str:
    """Measure a model's layers, write or complete its model file, and return a table, or JSON in SI units.

    ``config`` has been checked by `check_config`.

    Raises:
        InputError: The model cannot be built, or the file is of another model.
        RunError: A process that loads the machine during the measurement has ended.
    """
    # As in the ranks whose times are predicted: freed memory is kept, and a rank has its share of the threads.
    keep_freed_memory()
    samples = rising_numbers(config.samples, "--samples")
    device, kind = (CPU, config.kind or "cpu") if config.device == META else measured_device(config.device, config.kind)
    code = code_of(config)
    precision = config.measured_precision or "fp32"
    training = Training(
        max(samples), optimizer=Optimizer(config.optimizer), precision=precision, data=named_data(config)
    )
    threads = config.threads or threads_of_a_rank(config.ranks)
    torch.set_num_threads(threads)
    loaded = load_with_sizes(code, training.seed, training.precision, training.data)
    refuse_another_model(output, config.name, code, len(loaded.sizes), config.measured_precision)
    if isinstance(code, ModelCode) and config.device == META:
        return _count(loaded, code, training, output, as_json)
    beside = LoadConfig(
        str(config.code.resolve()),
        arguments_of(config),
        samples,
        config.optimizer,
        config.precision,
        threads,
        "" if config.data is None else str(config.data.resolve()),
        config.tokens or 0,
    )
    # Background processes stand for the other ranks, which will compute on this machine at the same time.
    with background_load(config.ranks - 1, beside), showing_rounds(profiling_steps(samples), tell) as begin:
        costs = profile_model(loaded, samples, training, config.repeats, device, begin)
    tied = [size.tied_bytes for size in loaded.sizes]
    layers = [_layer(*each, kind, config.split) for each in zip(costs.layers, tied, strict=True)]
    measured_on = {kind: in_words(device, threads)}
    add_to_model_file(output, ModelLayers(config.name, layers, code, config.precision, measured_on))
    if as_json:
        of_all = {"launch_overhead_s": costs.launch_overhead_s, "workspace_share": costs.workspace_share}
        found = {"kind": kind, "file": str(output), "confidence": CONFIDENCE, **asdict(costs), **of_all}
        return json.dumps(found, indent=2)
    return "\n".join([*_table(costs, max(samples)), f"written to {output}: name it as 'model:' of a scenario"])


def _count(loaded: LoadedModel, code: ModelCode, training: Training, output: Path, as_json: bool) -> str:
    """Write each layer's operations and bytes, from which a roofline estimates times; return the text to print."""
    layers = count_work(loaded, code, training)
    add_to_model_file(output, ModelLayers(code.path.stem, layers, code))
    if as_json:
        return json.dumps({"file": str(output), "layers": list(map(asdict, layers))}, indent=2)
    return "\n".join([*work_table(layers), f"written to {output}: name it as 'model:' of a scenario"])


def measured_device(name: str, kind: str | None) -> tuple[torch.device, str]:
    """Return the device ``cpu`` or ``cuda`` of this machine and its kind: ``kind``, ``cpu`` or the GPU's own name.

    Raises:
        InputError: There is no GPU, or the device is not of the kind, which is one of the datasheet.
    """
    device, own_name = CPU, cpu_name()
    if name != CPU.type:
        if not torch.cuda.is_available():
            raise InputError("torch finds no GPU here", where="--device", valid="choose 'cpu'")
        device, own_name = torch.device("cuda", 0), torch.cuda.get_device_name(0)
    kind = kind or ("cpu" if device == CPU else own_name)
    if not is_kind(kind, own_name):
        raise InputError(
            f"what is measured here is no '{kind}': torch computes on {own_name}",
            where="--kind",
            valid="choose another name, or measure on such a device",
        )
    return device, kind


def in_words(device: torch.device, threads: int) -> str:
    """Return what was measured: the processor or GPU, the threads of a CPU, and the version of torch."""
    versions = f"torch {torch.__version__}"
    if device == CPU:
        return f"{platform.processor() or platform.machine()}, {threads} threads, {versions}"
    return f"{torch.cuda.get_device_name(device)}, {versions}"


def _layer(costs: LayerCosts, tied_bytes: int, kind: str, split: bool) -> LayerProfile:
    times = costs.times.values()
    inputs_s = [each.backward_input_s.median for each in times]
    weights_s = [each.backward_weight_s.median for each in times]
    if not split:
        # An unsplit backward takes less time than its two parts.
        scale = [
            each.backward_s.median / whole if (whole := one + other) else 1.0
            for each, one, other in zip(times, inputs_s, weights_s, strict=True)
        ]
        inputs_s = [factor * each for factor, each in zip(scale, inputs_s, strict=True)]
        weights_s = [factor * each for factor, each in zip(scale, weights_s, strict=True)]
    table = TimeTable(
        tuple(costs.times),
        tuple(_rounded(each.forward_s.median) for each in times),
        tuple(map(_rounded, inputs_s)),
        tuple(map(_rounded, weights_s)),
    )
    update_s = _rounded(next(iter(times)).update_s.median)
    sizes = (costs.parameter_bytes, costs.output_bytes, costs.activation_bytes)
    return LayerProfile(costs.name, *sizes, {kind: table}, {kind: update_s}, memory=costs.memory, tied_bytes=tied_bytes)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


def _table(costs: ModelCosts, samples: int) -> list[str]:
    names = ("forward", "backward", "backward_input", "backward_weight")
    width = max(len(each.name) for each in costs.layers)
    lines = [
        f"{samples} samples, milliseconds; least and most of six rounds, which hold the median with {CONFIDENCE:.0%}",
        f"{'layer':{width}}  {'parameters':>12} {'kept a sample':>13} {'peak':>10}  "
        + "  ".join(f"{each:^24}" for each in names),
    ]
    for each in costs.layers:
        cells = [_cell(getattr(each.times[samples], f"{name}_s")) for name in names]
        sizes = f"{each.parameter_bytes / 1e3:9.1f} kB {each.activation_bytes / 1e3:10.1f} kB"
        peak = f"{size_text(each.peak_bytes):>10}"
        lines.append(f"{each.name:{width}}  {sizes} {peak}  " + "  ".join(f"{cell:24}" for cell in cells))
    launch = f"{1e6 * costs.launch_overhead_s:.1f} us"
    memory = f"memory: {{workspace_share: {costs.workspace_share:.2g}}}"
    return [
        *lines,
        f"peak of a pass through all layers: {size_text(costs.peak_bytes)}, beside parameters and their gradients",
        f"launch overhead: {launch} for every forward and backward, beside the layers' times; a scenario has both as "
        f"'effects: {{compute: {{launch_overhead: {launch}}}, {memory}}}'",
        *_unsteady(*costs.extremes_s(samples)),
    ]


def _unsteady(least_s: float, most_s: float) -> list[str]:
    """Return a warning if the rounds differ so much that their medians say little."""
    if most_s <= _STEADY * least_s:
        return []
    return [
        f"not steady: all layers take {1000 * least_s:.3g} ms in their quickest rounds, {1000 * most_s:.3g} ms in "
        "their slowest; end other programs on this machine and measure again"
    ]


def _cell(time: Interval) -> str:
    return f"{1000 * time.median:8.3f} ({1000 * time.least:.3f}-{1000 * time.most:.3f})"
