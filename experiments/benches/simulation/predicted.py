"""Predicts the step time of real training: measures the layers of a model, simulates with these times, then runs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch

from executor.backend import TorchBackend
from executor.control.launcher import prepared_job, run_job
from executor.core.job import RunConfig
from executor.profiling.layer_times import LayerTimes
from executor.training.models.loading import load_model, load_with_sizes
from executor.training.models.trainable import TensorParallelModel
from executor.training.parallel_layout import TracingGroup
from executor.training.tensor_parallel import shard_layer
from experiments.benches.cases import trained_scenario, two_stage_plan
from experiments.benches.result import Row
from experiments.models import convolutional, digits, gpt
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Link
from planner.scenario.datasheet import DATASHEET
from planner.scenario.effects import TransportEffects
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from planner.schedules import WHOLE
from sim.simulator import Simulator

# Many short rounds rather than few long ones: on a shared machine, the rate of a core changes from minute to minute.
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class TrainedCase:
    """A model that two ranks train.

    Attributes:
        samples: Number of samples in a microbatch.
        kind: Kind of both devices: ``cpu`` computes on the CPU, other kinds on a GPU if there is one.
        bandwidth_bps: Assumed rate of this machine's loopback in the simulation, each way, bits per second.
        host: Name of the machine that both devices are in; if empty, each is alone, in a region of its own.
        copy_bps: Rate of the copies between GPU and host in the simulation, bits per second; None for no copies.
        can_be_sharded: Whether a tensor-parallel group can train the model.
    """

    name: str
    code: ModelCode
    samples: int
    microbatches: int
    steps: int
    kind: str
    bandwidth_bps: float = 10e9
    host: str = ""
    copy_bps: float | None = None
    can_be_sharded: bool = False

    @property
    def scenario(self) -> Scenario:
        """Return a scenario of two devices that train the model, whose layers have placeholder times."""
        blank = TimeTable((self.samples,), (1.0,), (1.0,), (1.0,))
        profile = profile_of(self.code, {self.kind: blank})
        scenario = trained_scenario(profile, self.code, self.samples * self.microbatches, Optimizer())
        devices = tuple(replace(device, kind=self.kind) for device in scenario.cluster.devices)
        links = tuple(replace(link, bandwidth_bps=self.bandwidth_bps) for link in scenario.cluster.links)
        if self.host:
            memory_bytes = DATASHEET[self.kind].memory_bytes if self.kind in DATASHEET else devices[0].memory_bytes
            devices = tuple(
                replace(device, region="here", host=self.host, memory_bytes=memory_bytes) for device in devices
            )
            links = (Link("here", "here", self.bandwidth_bps, 0.0),)
        transport = TransportEffects(copies=self.copy_bps is not None, copy_bps=self.copy_bps)
        degree = len(devices)
        shards = {degree: shard_of(self.code, profile, degree)} if self.can_be_sharded else {}
        return replace(
            scenario,
            cluster=Cluster(devices, links),
            model=replace(profile, sharded=shards),
            effects=replace(scenario.effects, transport=transport),
        )

    def plan(self, scenario: Scenario, schedule: str) -> Plan:
        """Return a plan of two stages, each of half of the layers, with at most four microbatches in flight."""
        depth = min(4, self.microbatches)
        return two_stage_plan(scenario, schedule, (self.samples,) * self.microbatches, (depth, depth), "scheduled")


EXAMPLE = TrainedCase(
    "gpt",
    ModelCode(Path(gpt.__file__), {"vocabulary": 256, "width": 192, "heads": 4, "blocks": 8, "length": 64}),
    samples=4,
    microbatches=8,
    steps=20,
    kind="this-machine",
)

# The models of the fidelity bench.
PREDICTED = (
    EXAMPLE,
    TrainedCase(
        "convolutional",
        ModelCode(Path(convolutional.__file__), {"width": 32, "scales": 3, "side": 32}),
        samples=4,
        microbatches=8,
        steps=20,
        kind="this-machine",
    ),
    TrainedCase(
        "digits",
        ModelCode(Path(digits.__file__), {"width": 1024, "depth": 8}),
        samples=64,
        microbatches=8,
        steps=40,
        kind="this-machine",
    ),
)


def predict_real_compute(
    schedule: str, tell: Callable[[str], None], case: TrainedCase = EXAMPLE, rounds: int = ROUNDS
) -> Row:
    """Measure the layers of a model on two ranks, simulate its training, run it, and return medians over rounds.

    There are several rounds, since the share of the machine that two processes get changes from moment to moment. For
    the same reason the layers are measured before and after each run, which is compared with the mean of both
    simulations. Messages pass through this machine's loopback, which takes negligible time.
    """
    unmeasured = case.scenario
    plan = case.plan(unmeasured, schedule)

    def measured() -> Scenario:
        return replace(unmeasured, model=measured_profile(unmeasured, plan))

    scenarios, real = [measured()], []
    for number in range(rounds):
        tell(f"real compute, {case.name}, {schedule}, round {number + 1} of {rounds}")
        real.append(measure(TorchBackend("real", emulator="none").run(scenarios[-1], plan, None, case.steps)))
        scenarios.append(measured())
    simulated = [measure(Simulator().run(scenario, plan, None, case.steps)) for scenario in scenarios]
    steps_s = [fmean(each.step_s for each in around) for around in pairwise(simulated)]
    rates = [fmean(each.samples_per_s for each in around) for around in pairwise(simulated)]
    return {
        "case": f"real-{case.name}-{schedule}",
        "ranks": 2,
        "policy": "none",
        "simulated_step_s": median(steps_s),
        "real_step_s": median(each.step_s for each in real),
        "step_error": median(one / other.step_s - 1 for one, other in zip(steps_s, real, strict=True)),
        "throughput_error": median(one / other.samples_per_s - 1 for one, other in zip(rates, real, strict=True)),
        "wan_byte_difference": simulated[0].wan_bytes - real[0].wan_bytes,
    }


def profile_of(code: ModelCode, times: Mapping[str, TimeTable]) -> ModelProfile:
    """Return the model's profile with the true sizes of its layers, and with the given times for every layer."""
    sizes = load_with_sizes(code, seed=0).sizes
    layers = tuple(
        LayerProfile(f"layer-{n}", size.parameter_bytes, size.output.size_bytes, 0, times)
        for n, size in enumerate(sizes)
    )
    return ModelProfile(code.path.stem, layers)


def shard_of(code: ModelCode, whole: ModelProfile, degree: int) -> ModelProfile:
    """Return the profile of what each of ``degree`` devices of a tensor-parallel group holds, with the times of all."""
    with torch.device("meta"):
        model = load_model(code, seed=0)
    assert isinstance(model, TensorParallelModel), "only a model with a parallel layout can be sharded"
    layers = []
    for index, (layer, profile) in enumerate(zip(model.layers, whole.layers, strict=True)):
        shard_layer(layer, model.parallel_layout(index), TracingGroup(degree))
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())
        layers.append(replace(profile, parameter_bytes=size_bytes))
    return ModelProfile("shard", tuple(layers))


def measured_profile(scenario: Scenario, plan: Plan) -> ModelProfile:
    """Return the scenario's model with layer times that all ranks of the plan measure at once on this machine."""
    with prepared_job(scenario, plan, RunConfig("real", 1, "none", adapts=False)) as job:
        run_job(job, plan.devices, module="executor.profiling.layer_times")
        layers = list(scenario.model.layers)
        for rank, device in enumerate(plan.devices):
            kind = scenario.cluster.by_name[device].kind
            for entry in json.loads((job.path / f"layers-{rank}.json").read_text()):
                times = LayerTimes(**entry)
                old = layers[times.layer]
                table = _table(times, split=plan.schedule not in WHOLE)
                layers[times.layer] = replace(
                    old, times={**old.times, kind: table}, update_s={**old.update_s, kind: times.update_s}
                )
        return replace(scenario.model, layers=tuple(layers))


def _table(times: LayerTimes, split: bool) -> TimeTable:
    input_s, weight_s = times.backward_input_s, times.backward_weight_s
    if not split:
        # An unsplit backward takes less time than its two parts.
        scale = times.backward_s / (input_s + weight_s)
        input_s, weight_s = scale * input_s, scale * weight_s
    return TimeTable((times.samples,), (times.forward_s,), (input_s,), (weight_s,))
