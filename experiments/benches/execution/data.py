"""Measures how much longer a step takes whose data is in files of tokens than one whose data is held in memory.

Two ranks of this machine train a language model of 58 million parameters. Its odd steps read files of tokens, its even
steps get the same kind of samples from memory. So both are measured at the same time, since the speed of the machine
changes by more than the reading takes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from executor.backend import TorchBackend
from executor.training.data.loader import BatchPart, SampleLoader
from executor.training.data.order import Batch
from executor.training.data.sources import open_data
from experiments.benches.cases import TWO_DEVICES, trained_scenario, two_stage_plan
from experiments.benches.result import BenchResult, at_most
from experiments.benches.simulation.predicted import profile_of
from planner.events.event import EventKind
from planner.runs.record import RunRecord
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import ModelCode
from planner.scenario.training import Optimizer, TokenFiles, TrainingData
from traces.common.atomic import scratch_folder

LENGTH, VOCABULARY = 32, 32_000
MICROBATCHES, SAMPLES = 4, 1
STEPS, QUICK_STEPS, WARMUP = 240, 24, 4
FILES, TOKENS = 4, 4_000_000

# The most by which files of tokens may lengthen a step, as a share of the step.
MOST_SHARE = 0.01

# Number of steps whose samples are read alone.
_READ_STEPS = 200

_MODEL = """
from pathlib import Path

import torch

from executor.training.data.tokens import TokenSamples
from experiments.models.llama import build as build_llama
from planner.scenario.training import TokenFiles

HELD = 512


class Alternating:
    def __init__(self, folder, length, global_batch):
        model = build_llama()
        self.layers, self.loss, self._global_batch = model.layers, model.loss, global_batch
        self._files = TokenSamples(TokenFiles(Path(folder), length), seed=0)
        self._inputs, self._targets = self._files.samples(0, HELD)

    def samples(self, first, count):
        if first // self._global_batch % 2:
            return self._files.samples(first, count)
        start = first % HELD
        return self._inputs[start : start + count], self._targets[start : start + count]


def build(*, folder, length, global_batch):
    return Alternating(folder, length, global_batch)
"""


def measure_data(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Train with both kinds of data in turn; compare neighbouring steps, and the time of the reading alone."""
    samples, steps = MICROBATCHES * SAMPLES, QUICK_STEPS if quick else STEPS
    # The times are never used: the plan is written by hand.
    unused = TimeTable((1,), (0.01,), (0.01,), (0.01,))
    with _folder() as folder:
        code = ModelCode(
            folder / "model.py", {"folder": str(folder), "length": LENGTH, "global_batch": MICROBATCHES * SAMPLES}
        )
        profile = profile_of(code, dict.fromkeys(TWO_DEVICES, unused))
        scenario = trained_scenario(profile, code, samples, Optimizer("sgd", learning_rate=0.01))
        plan = two_stage_plan(scenario, "1f1b", (SAMPLES,) * MICROBATCHES, (2, 1), "scheduled")
        tell(f"{steps} steps, of which every second reads files of tokens")
        times_s = _steps_s(TorchBackend("real", emulator="none").run(scenario, plan, None, steps), steps)
        read_s = _reading_s(TrainingData(TokenFiles(folder, LENGTH)), samples)
    in_memory_s, in_files_s = times_s[::2], times_s[1::2]
    ratios = [one / other for one, other in zip(in_files_s, in_memory_s, strict=True)]
    low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    step_s = median(in_memory_s)
    return BenchResult(
        [
            {"data": "in memory", "step_s": step_s},
            {
                "data": "files of tokens",
                "step_s": median(in_files_s),
                "to_step_before": ratio,
                "first_quartile": low,
                "third_quartile": high,
                "reading_s": read_s,
            },
        ],
        [
            at_most("step with files of tokens / step with data in memory", ratio, 1 + MOST_SHARE),
            at_most("reading of a step's tokens / step", read_s / step_s, MOST_SHARE),
        ],
    )


@contextmanager
def _folder() -> Iterator[Path]:
    """Return a context with a folder of files of random tokens, and the model that reads them."""
    with scratch_folder() as place:
        random = np.random.default_rng(0)
        for number in range(FILES):
            random.integers(0, VOCABULARY, TOKENS, np.uint16).tofile(place / f"{number}.bin")
        (place / "model.py").write_text(_MODEL)
        yield place


def _steps_s(record: RunRecord, steps: int) -> list[float]:
    """Return the time from the end of each step to that of the next one, after the first steps."""
    ends_s = [0.0] * steps
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            ends_s[event.step] = max(ends_s[event.step], event.end_s)
    return [after_s - before_s for before_s, after_s in zip(ends_s[WARMUP - 1 :], ends_s[WARMUP:], strict=False)]


def _reading_s(data: TrainingData, samples: int) -> float:
    """Return the time in which a rank with first and last stage reads a step's samples, with nothing else to do."""
    loader = SampleLoader(open_data(data, seed=0), 0, data.workers)
    parts = [BatchPart(number * SAMPLES, SAMPLES, True, True) for number in range(MICROBATCHES)]
    times_s = []
    for step in range(_READ_STEPS):
        start_s = time.perf_counter()
        loader.start_step(Batch(step * samples, samples), parts)
        for part in parts:
            loader.inputs(part.start, part.count)
            loader.targets(part.start, part.count)
        times_s.append(time.perf_counter() - start_s)
    loader.close()
    return median(times_s)
