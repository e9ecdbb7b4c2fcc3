"""``make gpu``: checks and measures the executor on CUDA, and writes a page that names the hardware.

Two ranks train in several variants, whose results must equal training in one process. Each layer of the example models
is timed, and the step time that a simulation predicts from these times is compared with the measured one. Two ranks
share a single GPU. The command is ``python -m experiments.benches.execution.gpu_check -o docs/measurements-gpu.md``.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from executor.profiling.layer_times import REPEATS, measure_layers
from executor.training.models.loading import load_with_sizes
from experiments.benches.execution.equal_training import WAYS, TrainingCase, check_training
from experiments.benches.execution.gpu_transport import check_copies, check_nccl
from experiments.benches.result import Check, Row
from experiments.benches.simulation.predicted import TrainedCase, predict_real_compute
from experiments.models import convolutional, gpt
from experiments.runs.console import check_targets
from planner.scenario.scenario import ModelCode
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError, RopebridgeError

# Without this, convolutions, and in some containers matrix products, would round their inputs to 10 bits. It overrides
# the settings of programs, and must be set before NVIDIA's libraries are loaded (NVIDIA, "Accelerating AI Training with
# NVIDIA TF32 Tensor Cores").
_NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}

_GPT, _CONVOLUTIONAL = Path(gpt.__file__), Path(convolutional.__file__)
_GPU = "this-gpu"
# Assumed, and stated on the page: rate from memory to memory over this machine's loopback, bits per second.
_LOOPBACK_BPS = 20e9


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """The cases of a GPU check.

    Attributes:
        equal: Cases that two ranks and one process train, in each variant of ``ways``.
        timed: Cases whose layers are timed, and whose steps are predicted and measured with each of ``schedules``.
        repeats: Number of measurements of each layer; the median counts.
    """

    equal: Sequence[TrainedCase]
    ways: Sequence[TrainingCase]
    timed: Sequence[TrainedCase]
    schedules: Sequence[str]
    repeats: int


_small = partial(TrainedCase, samples=4, microbatches=3, steps=5, kind=_GPU)
_large = partial(TrainedCase, microbatches=8, steps=20, kind=_GPU, bandwidth_bps=_LOOPBACK_BPS)

FULL = GpuCheck(
    equal=(
        _small(
            "gpt",
            ModelCode(_GPT, {"vocabulary": 64, "width": 64, "heads": 4, "blocks": 4, "length": 32}),
            can_be_sharded=True,
        ),
        _small("convolutional", ModelCode(_CONVOLUTIONAL, {"width": 16, "scales": 2, "side": 32, "classes": 10})),
    ),
    ways=WAYS,
    timed=(
        _large(
            "gpt",
            ModelCode(_GPT, {"vocabulary": 8192, "width": 1024, "heads": 16, "blocks": 8, "length": 256}),
            samples=8,
        ),
        _large(
            "convolutional",
            ModelCode(_CONVOLUTIONAL, {"width": 128, "scales": 3, "side": 64, "classes": 10}),
            samples=32,
        ),
    ),
    schedules=("1f1b", "zb-h1"),
    repeats=REPEATS,
)


def run_gpu_check(check: GpuCheck, device: torch.device, tell: Callable[[str], None]) -> tuple[str, bool]:
    """Run all cases; return the page, in Markdown, and whether everything that this machine can show is as it should.

    The training in one process and the timed layers run on ``device``.
    """
    checks = [each for case in check.equal for each in check_training(case, device, check.ways, tell)]
    equal = _table([_check_row(each) for each in checks])
    parts = ["# Measured on a GPU\n", _hardware(device), "## Training equals one process\n", _EQUAL, equal]
    tell("messages between GPUs")
    through_nccl, unverified = check_nccl(check.equal, device, tell)
    copy_bps: float | None = None
    parts += ["## Messages between GPUs\n", _MESSAGES]
    if device.type == "cuda":
        copies, rates = check_copies(check.equal[0], device)
        copy_bps = rates.slower_bps
        parts.append(_table([{"check": each.name, "holds": "yes" if each.holds else "NO"} for each in copies]))
        parts.append(f"{rates}\n")
        checks += copies
    parts.append(unverified + "\n" if unverified else _table([_check_row(each) for each in through_nccl]))
    checks += through_nccl
    timed = [replace(case, copy_bps=copy_bps) for case in check.timed]
    for case in timed:
        tell(f"layers of {case.name}")
        parts += [f"## Layers of the example {case.name}\n", _size_of(case), _table(_layer_rows(case, check, device))]
    rows = [predict_real_compute(schedule, tell, case, rounds=3) for case in timed for schedule in check.schedules]
    parts += ["## Predicted and measured steps\n", _PREDICTED, _table([_step_row(row) for row in rows])]
    return "\n".join(parts), all(each.holds for each in checks)


_EQUAL = """Two ranks through gloo, momentum, float32 without TF32. The figure is the largest difference of a loss or a
parameter after all steps, over 1 + the value that one process on the same device has; with bf16, of a loss.
"""

_MESSAGES = """gloo carries messages from host to host. Copy engines take them there and back, on CUDA streams of their
own. NCCL carries them between two GPUs, and the sums of a tensor-parallel group; its figures are as those above.
"""

_PREDICTED = f"""Two ranks on this machine, which take its GPUs in turn: with one GPU they share it, and each layer was
timed while the other rank timed its own. Payloads are staged through the CPU and gloo: in the simulation they are
copied at the slower of the two rates above, and the connection between the ranks carries {_LOOPBACK_BPS / 1e9:g}
Gbit/s, which is assumed. The simulation ran first.
"""


def _hardware(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    count = torch.cuda.device_count() if on_gpu else 0
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"
    if on_gpu:
        versions = f"driver {_driver()}, CUDA {torch.version.cuda}, {versions}"
    return f"{', '.join(names) or 'CPU'}; {os.cpu_count()} cores; {versions}.\n"


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "of an unknown version"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return found[0] if found else "of an unknown version"


def _layer_rows(case: TrainedCase, check: GpuCheck, device: torch.device) -> list[Row]:
    """Time each layer alone, and return a row for each; no other process uses the GPU meanwhile."""
    training = case.scenario.training
    loaded = load_with_sizes(case.code, training.seed, training.precision)
    layers = range(len(loaded.sizes))
    return [
        {
            "layer": times.layer,
            "parameters MB": loaded.sizes[times.layer].parameter_bytes / 1e6,
            "forward ms": 1000 * times.forward_s,
            "backward ms": 1000 * times.backward_s,
            "input gradient ms": 1000 * times.backward_input_s,
            "weight gradient ms": 1000 * times.backward_weight_s,
            "update ms": 1000 * times.update_s,
        }
        for times in measure_layers(loaded, layers, case.samples, training, check.repeats, device)
    ]


def _step_row(row: Row) -> Row:
    return {
        "case": row["case"],
        "simulated step ms": 1000 * float(row["simulated_step_s"]),
        "measured step ms": 1000 * float(row["real_step_s"]),
        "step error %": 100 * float(row["step_error"]),
    }


def _size_of(case: TrainedCase) -> str:
    arguments = ", ".join(f"{name} {value}" for name, value in case.code.arguments.items())
    return f"{arguments}; float32 without TF32, microbatches of {case.samples} samples.\n"


def _check_row(check: Check) -> Row:
    return {
        "training": check.name,
        "largest difference": f"{check.value:.1e}",
        "at most": f"{check.bar:g}",
        "equal": "yes" if check.holds else "NO",
    }


def _table(rows: Sequence[Row]) -> str:
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([_cell(row[head]) for head in heads] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: str | float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str]) -> int:
    """Run the check and write its page; return the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="the page, a Markdown file")
    output: Path = parser.parse_args(arguments).output
    try:
        check_targets([output])
        if not torch.cuda.is_available():
            raise InputError(
                "this machine has no GPU that torch can use",
                valid="run 'make gpu' where 'torch.cuda.is_available()' is true; everything else is tested on the CPU",
            )
        if not os.environ.items() >= _NO_TF32.items():
            command = [sys.executable, "-m", "experiments.benches.execution.gpu_check", *arguments]
            os.execve(sys.executable, command, {**os.environ, **_NO_TF32})
        page, equal = run_gpu_check(FULL, torch.device("cuda", 0), lambda line: print(line, file=sys.stderr))
        # The page is printed first, so that minutes of measuring are not lost if the file cannot be written.
        print(page, flush=True)
        write_text_atomically(output, page)
    except RopebridgeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
