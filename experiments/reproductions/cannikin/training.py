"""Simulates training to a target with a rising gradient noise scale, by Cannikin and the systems compared with it.

Progress is counted in samples of the first batch's efficiency: a step of B samples takes the simulated step time and
adds ``B * efficiency(B)``. A run has `EPOCHS` parts of equal progress, at the beginning of which a system may choose
another batch. All systems know the noise scale.

The kinds and numbers of GPUs are those of the paper; their machines and the network are assumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from experiments.reproductions.architectures import MODELS
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import find_kind
from planner.scenario.profile import ModelProfile
from planner.scenario.roofline import roofline_layer
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training
from planner.step.evaluate import step_time_s
from planner.systems.cannikin.goodput import candidate_batches, choose_batch, goodput_per_s
from planner.systems.cannikin.opt_perf import batch_time_s, opt_perf
from planner.systems.cannikin.speed_learning import SpeedLearner, SumLearner, measured_nodes, measured_sums
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed
from planner.systems.cannikin.strategy import adaptdl, data_parallel_plan, lb_bsp, update_s
from sim.simulator import Simulator

# Maps a cluster to its machines, each with the kind and the number of its GPUs. Assumption: workstations of one GPU in
# A; in B one machine of four A100, one of four V100, and eight machines of one RTX 6000.
MACHINES: Mapping[str, Sequence[tuple[str, int]]] = {
    "A": (("a5000", 1), ("a4000", 1), ("p4000", 1)),
    "B": (("a100-40", 4), ("v100-16", 4), *((("rtx-6000", 1),) * 8)),
}

# Assumption: a LAN that never limits, and PCI Express inside machines.
LAN_LATENCY_S = 50e-6
INSIDE_BPS = 100e9
INSIDE_LATENCY_S = 10e-6

# Assumption: TF32 on GPUs that have it, the default of PyTorch's convolutions; 32 bits everywhere else.
PRECISION = "tf32"


def cluster(name: str, network_bps: float) -> Cluster:
    """Return one of `MACHINES`, with network interfaces of ``network_bps`` bits per second."""
    devices, links = [], []
    for number, (kind, count) in enumerate(MACHINES[name]):
        host = f"host-{number}"
        for index in range(count):
            memory_bytes = find_kind(kind).memory_bytes
            device = Device(f"{kind}-{number}-{index}", kind, "lan", memory_bytes, host=host, interface_bps=network_bps)
            devices.append(device)
        if count > 1:
            links.append(Link(host, host, INSIDE_BPS, INSIDE_LATENCY_S))
    links.append(Link("lan", "lan", network_bps * len(MACHINES[name]), LAN_LATENCY_S))
    return Cluster(tuple(devices), tuple(links))


@lru_cache(maxsize=16)
def base_scenario(cluster_name: str, model: str, network_bps: float) -> Scenario:
    """Return one of `MODELS` on one of `MACHINES`, with the model's first batch and interfaces of ``network_bps``."""
    trained, place = MODELS[model](), cluster(cluster_name, network_bps)
    kinds = [find_kind(kind) for kind in dict.fromkeys(device.kind for device in place.devices)]
    layers = tuple(roofline_layer(work, kinds, PRECISION) for work in trained.layers)
    training = Training(trained.first_batch, optimizer=Optimizer(trained.optimizer))
    return Scenario(f"cluster {cluster_name}", place, ModelProfile(trained.name, layers), training)


def with_batch(scenario: Scenario, batch: int) -> Scenario:
    """Return the scenario with another global batch."""
    return replace(scenario, training=replace(scenario.training, global_batch=batch))


class LearnedModel:
    """The model of a cluster's speed that Cannikin learns from the steps of a run.

    Args:
        scenario: The scenario that is trained; its batch may change.
        overlap: Whether all-reduces overlap with the backward in the model; otherwise they follow the backward.
    """

    def __init__(self, scenario: Scenario, *, overlap: bool = True) -> None:
        self._scenario = scenario
        self._overlap = overlap
        self._nodes = SpeedLearner()
        self._sums = SumLearner()
        self._made: dict[int, tuple[Plan, float]] = {}
        self._simulated_s: dict[Plan, float] = {}

    def predicted_s(self, batch: int) -> float:
        """Predict the time of a step with ``batch`` samples, seconds."""
        return self._divided(batch)[1]

    def simulated_s(self, batch: int) -> float:
        """Simulate a step with ``batch`` samples without learning from it; return its time, seconds."""
        return self._simulate(self._divided(batch)[0], batch)

    def run(self, batch: int, *, even: bool = False) -> float:
        """Simulate a step with ``batch`` samples and learn from it; return its time, seconds.

        With ``even`` all devices have equal shares, otherwise those with the least predicted step time.
        """
        plan = adaptdl(with_batch(self._scenario, batch)) if even else self._divided(batch)[0]
        return self._simulate(plan, batch, learn=True)

    def _simulate(self, plan: Plan, batch: int, *, learn: bool = False) -> float:
        # The simulator is deterministic: a repeated step would show nothing new.
        if plan in self._simulated_s:
            return self._simulated_s[plan]
        events = list(Simulator().run(with_batch(self._scenario, batch), plan, None, 1).events)
        step_s = max(event.end_s for event in events) - min(event.start_s for event in events)
        if learn:
            self._simulated_s[plan] = step_s
            for device, times in measured_nodes(events, 0, plan).items():
                self._nodes.observe(device, times)
            self._sums.observe(measured_sums(events, 0))
            self._made.clear()
        return step_s

    def _divided(self, batch: int) -> tuple[Plan, float]:
        if batch not in self._made:
            self._made[batch] = self._divide_anew(batch)
        return self._made[batch]

    def _divide_anew(self, batch: int) -> tuple[Plan, float]:
        speeds = {name: self._nodes.speed(name) for name in self._scenario.cluster.by_name if self._nodes.knows(name)}
        lines = all(map(self._nodes.has_line, speeds))
        sums = self._sums.sums()
        # In the second step, with each speed known from one step only, shares are in proportion to speeds.
        weighed = sums if lines and self._overlap else NO_SUMS

        def over_step(device: str, count: int) -> NodeSpeed:
            return speeds[device].over_step(count, update_s(self._scenario, device))

        def divide(samples: int, count: int, devices: Sequence[str], most: Sequence[int]) -> Sequence[int]:
            known = [over_step(device, count) for device in devices]
            return opt_perf(samples, known, weighed, most).samples

        plan = data_parallel_plan(with_batch(self._scenario, batch), "cannikin", divide, tuple(speeds))
        (pipeline,) = plan.pipelines
        (stage,) = pipeline.stages
        known = [over_step(replica.device, len(pipeline.microbatches)) for replica in stage.replicas]
        own = [replica.share for replica in stage.replicas]
        if self._overlap:
            return plan, batch_time_s(own, known, sums)
        return plan, batch_time_s(own, known, NO_SUMS) + sums.overlapped_s + sums.last_s


# Assumption: the number of parts of a run, and the largest batch in multiples of the first one.
EPOCHS = 100
LARGEST_BATCH = 32

# Gradient noise scale at the beginning and at the end, in multiples of the first batch; in between it rises
# exponentially. The tenfold rise is assumed, after the image models in An Empirical Model of Large-Batch Training
# (McCandlish et al., 2018).
NOISE_CURVES: Mapping[str, tuple[float, float]] = {"low": (0.5, 5.0), "middle": (2.0, 20.0), "high": (8.0, 80.0)}


@dataclass(frozen=True, slots=True)
class Setting:
    """A scenario with its first batch, the name of one of `NOISE_CURVES`, and the number of candidate batches."""

    scenario: Scenario
    curve: str
    count: int

    @property
    def first_batch(self) -> int:
        """Return the number of samples of a step at the beginning of the run."""
        return self.scenario.training.global_batch

    @property
    def candidates(self) -> tuple[int, ...]:
        """Return the candidate batches."""
        return candidate_batches(self.first_batch, LARGEST_BATCH * self.first_batch, self.count)

    def noise_scale(self, epoch: int) -> float:
        """Return the gradient noise scale in the middle of part ``epoch`` of the run, samples."""
        first, last = NOISE_CURVES[self.curve]
        return float(self.first_batch * first * (last / first) ** ((epoch + 0.5) / EPOCHS))


@dataclass(frozen=True, slots=True)
class Trained:
    """The training of one system.

    Attributes:
        epochs_s: Seconds per unit of progress in each part of the run.
        batches: Number of samples of a step in each part of the run.
        errors: Relative errors of the predicted step times on which choices of a batch were based.
    """

    epochs_s: tuple[float, ...]
    batches: tuple[int, ...]
    errors: tuple[float, ...] = ()

    @property
    def time_s(self) -> float:
        """Return the mean seconds per unit of progress over the whole run."""
        return sum(self.epochs_s) / len(self.epochs_s)


def fixed(setting: Setting, plan: Callable[[Scenario], Plan]) -> Trained:
    """Train with the first batch and the plan that a strategy makes for it."""
    batch = setting.first_batch
    step_s = step_time_s(plan(setting.scenario), setting.scenario)
    return Trained((step_s / batch,) * EPOCHS, (batch,) * EPOCHS)


def adaptive_even(setting: Setting) -> Trained:
    """Train as AdaptDL does: even shares, and the batch with the highest goodput.

    AdaptDL gets the true step time of each candidate batch, so that only its shares are worse than Cannikin's.
    """
    epochs_s, batches, batch = [], [], setting.first_batch
    step_s = partial(_even_step_s, setting.scenario)
    for epoch in range(EPOCHS):
        noise = setting.noise_scale(epoch)
        batch = choose_batch(batch, setting.candidates, step_s, setting.first_batch, noise)
        epochs_s.append(1 / goodput_per_s(batch, step_s(batch), setting.first_batch, noise))
        batches.append(batch)
    return Trained(tuple(epochs_s), tuple(batches))


@lru_cache(maxsize=4096)
def _even_step_s(scenario: Scenario, batch: int) -> float:
    changed = with_batch(scenario, batch)
    return step_time_s(adaptdl(changed), changed)


def adaptive_learned(setting: Setting, overlap: bool = True) -> tuple[Trained, LearnedModel]:
    """Train as Cannikin does: learn from the steps, divide by OptPerf, and choose the batch by predicted goodput.

    The first part of the run has even shares, the second has shares in proportion to speeds, both with the first batch.
    ``overlap`` is the argument of `LearnedModel`.
    """
    model = LearnedModel(setting.scenario, overlap=overlap)
    batch = setting.first_batch
    epochs_s: list[float] = []
    batches: list[int] = []
    errors: list[float] = []
    for epoch in range(EPOCHS):
        noise = setting.noise_scale(epoch)
        if epoch > 1:
            batch = choose_batch(batch, setting.candidates, model.predicted_s, setting.first_batch, noise)
        predicted_s = model.predicted_s(batch) if epoch > 1 else None
        step_s = model.run(batch, even=epoch == 0)
        if predicted_s is not None and batch != batches[-1]:
            errors.append(predicted_s / step_s - 1)
        epochs_s.append(1 / goodput_per_s(batch, step_s, setting.first_batch, noise))
        batches.append(batch)
    return Trained(tuple(epochs_s), tuple(batches), tuple(errors)), model


# The systems that Cannikin is compared with; all sum gradients in the same buckets during the backward.
SYSTEMS: Mapping[str, Callable[[Setting], Trained]] = {
    "ddp": partial(fixed, plan=adaptdl),
    "lb-bsp": partial(fixed, plan=lb_bsp),
    "adaptdl": adaptive_even,
}
