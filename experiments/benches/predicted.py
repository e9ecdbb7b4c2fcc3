"""Real compute predicted: the layers of the example GPT are measured first, then a run is simulated, then it runs."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from executor.backend import TorchBackend
from executor.job import JobFolder, Orders
from executor.launcher import run_job
from executor.model import load_with_sizes
from executor.profiling import LayerTimes
from executor.shaper import create_ledger
from executor.wan.origin import create_origin
from experiments.benches.result import Row
from experiments.benches.two_stages import DEVICES, trained_scenario, two_stage_plan
from experiments.models import gpt
from planner.metrics import measure
from planner.plan import Plan
from planner.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario import ModelCode, Scenario
from planner.schedules import WHOLE
from sim.simulator import Simulator

MODEL = {"vocabulary": 256, "width": 192, "heads": 4, "blocks": 8, "length": 64}
SAMPLES, MICROBATCHES = 4, 8
STEPS = 40


def predict_real_compute(schedule: str, tell: Callable[[str], None]) -> Row:
    """Profile two ranks of the example GPT on this machine, simulate them, run them, and compare.

    The links are this machine's own, which take no time that counts.
    """
    tell(f"real compute, {schedule}")
    code = ModelCode(Path(gpt.__file__), MODEL)
    blank = TimeTable((SAMPLES,), (1.0,), (1.0,), (1.0,))
    unmeasured = trained_scenario(profile_of(code, dict.fromkeys(DEVICES, blank)), code, SAMPLES * MICROBATCHES)
    plan = two_stage_plan(unmeasured, schedule, (SAMPLES,) * MICROBATCHES, (4, 4), "scheduled")
    scenario = replace(unmeasured, model=measured_profile(unmeasured, plan))
    simulated = measure(Simulator().run(scenario, plan, None, STEPS))
    real = measure(TorchBackend("real", emulator="none").run(scenario, plan, None, STEPS))
    return {
        "case": f"real-gpt-{schedule}",
        "ranks": 2,
        "policy": "none",
        "simulated_step_s": simulated.step_s,
        "real_step_s": real.step_s,
        "step_error": simulated.step_s / real.step_s - 1,
        "throughput_error": simulated.samples_per_s / real.samples_per_s - 1,
        "wan_byte_difference": simulated.wan_bytes - real.wan_bytes,
    }


def profile_of(code: ModelCode, times: Mapping[str, TimeTable]) -> ModelProfile:
    """Return the model's true sizes, with the same times for every layer."""
    sizes = load_with_sizes(code, seed=0).sizes
    layers = tuple(
        LayerProfile(f"layer-{n}", size.parameter_bytes, size.output.size_bytes, 0, times)
        for n, size in enumerate(sizes)
    )
    return ModelProfile(code.path.stem, layers)


def measured_profile(scenario: Scenario, plan: Plan) -> ModelProfile:
    """Return the scenario's model with the times that the plan's ranks measure, all at once, on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="ropebridge-"))
    try:
        job = JobFolder(folder)
        job.write(scenario, plan, Orders("real", 1, "none", adapts=False))
        create_ledger(job.ledger, scenario.cluster)
        create_origin(job.origin)
        run_job(job, plan.devices, module="executor.profile_worker")
        layers = list(scenario.model.layers)
        for rank, device in enumerate(plan.devices):
            kind = scenario.cluster.by_name[device].kind
            for entry in json.loads((folder / f"layers-{rank}.json").read_text()):
                times = LayerTimes(**entry)
                old = layers[times.layer]
                table = _table(times, split=plan.schedule not in WHOLE)
                layers[times.layer] = replace(
                    old, times={**old.times, kind: table}, update_s={**old.update_s, kind: times.update_s}
                )
        return replace(scenario.model, layers=tuple(layers))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _table(times: LayerTimes, split: bool) -> TimeTable:
    input_s, weight_s = times.backward_input_s, times.backward_weight_s
    if not split:
        # A whole backward takes less than its two parts.
        scale = times.backward_s / (input_s + weight_s)
        input_s, weight_s = scale * input_s, scale * weight_s
    return TimeTable((times.samples,), (times.forward_s,), (input_s,), (weight_s,))
