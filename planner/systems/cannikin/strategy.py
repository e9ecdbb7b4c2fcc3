"""AdaptDL (Pollux, OSDI'21): data parallelism with even shares of a batch that follows the goodput.

AdaptDL takes all devices for equal, and raises the batch as the gradient gets noisier. A plan keeps the scenario's
global batch, so as a strategy this is even shares; `planner.systems.cannikin.goodput` chooses batches where a
reproduction lets them grow.

Assumed: the same buckets and microbatches as `planner.systems.cannikin.strategy`, so that the division is all that
differs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

from planner.cost.in_flight import fitting_depths
from planner.cost.memory import most_samples, needed_bytes
from planner.cost.network import nominal_path
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.opt_perf import opt_perf
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed, SumTimes, fit_speed, sum_times
from traces.common.errors import InputError
from traces.common.units import size_text

# What PyTorch's DistributedDataParallel collects in a bucket before it sums it.
BUCKET_BYTES = 25 * 2**20

# A line through so many sample counts describes what the profile says of a device.
_FITTED_COUNTS = 16

Divide = Callable[[int, int, Sequence[str], Sequence[int]], Sequence[int]]
"""How many samples of a microbatch each device takes, from: its samples, the number of microbatches, the devices, and
how many samples fit into the memory of each."""


def data_parallel_plan(scenario: Scenario, strategy: str, divide: Divide, devices: Sequence[str] = ()) -> Plan:
    """Return one stage in which devices take what ``divide`` says of the fewest equal microbatches that fit.

    Devices to which it gives nothing are left out. Sums of gradients overlap with backward, in buckets as PyTorch's
    DistributedDataParallel has them.

    Args:
        scenario: Gives the global batch and what memory holds.
        strategy: What the plan says of its origin.
        divide: Gives each device its samples.
        devices: Those to use; all if empty.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    names = tuple(devices) or tuple(scenario.cluster.by_name)
    most = tuple(fitting_samples(scenario, name) for name in names)
    if not any(most):
        raise _holds_nothing(scenario, strategy, names)
    batch = scenario.training.global_batch
    for count in range(ceil(batch / sum(most)), batch + 1):
        microbatches = even_cut(batch, count)
        samples = divide(microbatches[0], count, names, most)
        plan = plan_of_samples(scenario, strategy, names, samples, microbatches)
        # Rounding may give a device more of a smaller microbatch.
        if fitting_depths((1,), plan.pipelines[0].stages, scenario, microbatches) is not None:
            return plan
    raise _holds_nothing(scenario, strategy, names)


def plan_of_samples(
    scenario: Scenario, strategy: str, devices: Sequence[str], samples: Sequence[int], microbatches: tuple[int, ...]
) -> Plan:
    """Return one stage in which each device takes so many samples of a microbatch as large as the first one.

    Devices without samples are left out.
    """
    replicas = tuple(Replica(name, float(own)) for name, own in zip(devices, samples, strict=True) if own > 0)
    stage = Stage(0, len(scenario.model.layers), replicas, in_flight=1)
    how = Synchronisation(bucket_bytes=BUCKET_BYTES)
    pipelines = (Pipeline((stage,), microbatches),)
    return Plan(scenario.name, scenario.model.name, strategy, "1f1b", pipelines, synchronisation=how)


def divide_evenly(batch: int, count: int, devices: Sequence[str], most: Sequence[int]) -> Sequence[int]:
    """Give every device that can hold the model the same, but for one sample: see `Divide`."""
    even = iter(even_cut(batch, sum(limit > 0 for limit in most)))
    return [next(even) if limit > 0 else 0 for limit in most]


def even_plan(scenario: Scenario, strategy: str) -> Plan:
    """Return the plan of even shares.

    Raises:
        InputError: As `data_parallel_plan`.
    """
    return data_parallel_plan(scenario, strategy, divide_evenly)


def balanced_plan(scenario: Scenario, strategy: str, *, with_sums: bool) -> Plan:
    """Return the plan of balanced shares, by the scenario's profile and the declared bandwidths.

    Args:
        scenario: What it is for.
        strategy: What the plan says of its origin.
        with_sums: Whether the sums of gradients and their overlap count; otherwise compute alone is balanced.

    Raises:
        InputError: As `data_parallel_plan`.
    """
    return data_parallel_plan(scenario, strategy, partial(_balance, scenario, with_sums))


def _balance(
    scenario: Scenario, with_sums: bool, batch: int, count: int, devices: Sequence[str], most: Sequence[int]
) -> Sequence[int]:
    speeds = [
        profiled_speed(scenario, name, min(batch, limit)).over_step(count, update_s(scenario, name))
        for name, limit in zip(devices, most, strict=True)
    ]
    sums = nominal_sums(scenario, devices, batch, count) if with_sums else NO_SUMS
    return opt_perf(batch, speeds, sums, most).samples


def nominal_sums(scenario: Scenario, devices: Sequence[str], batch: int, count: int = 1) -> SumTimes:
    """Return what sums over these devices take at the declared bandwidths, with even shares of each microbatch."""
    plan = plan_of_samples(scenario, "", devices, [1] * len(devices), (max(batch, len(devices)),) * count)
    return sum_times(plan, scenario, partial(nominal_path, scenario))


def profiled_speed(scenario: Scenario, device: str, most: int) -> NodeSpeed:
    """Return the lines that come closest to a device's profile, over sample counts from 1 to ``most``.

    One sample at least, also where a device cannot have any. What the optimizer's update takes is not part of it.
    """
    kind, layers = scenario.cluster.by_name[device].kind, len(scenario.model.layers)
    launch_s = scenario.effects.compute.launch_overhead_s
    counts = sorted({max(1, round(most * part / _FITTED_COUNTS)) for part in range(1, _FITTED_COUNTS + 1)} | {1})
    times = [scenario.model.times(0, layers, kind, count) for count in counts]
    # A layer may be timed at nothing, of which there is no share to be off by.
    least_s = 1e-12
    forward_s = [max(least_s, each.forward_s + launch_s) for each in times]
    backward_s = [max(least_s, each.backward_s + launch_s) for each in times]
    return fit_speed(counts, forward_s, backward_s)


def update_s(scenario: Scenario, device: str) -> float:
    """Return the seconds that the optimizer's update of the whole model takes on a device."""
    return scenario.model.update_s(0, len(scenario.model.layers), scenario.cluster.by_name[device].kind)


def fitting_samples(scenario: Scenario, device: str) -> int:
    """Return how many samples of one microbatch fit into a device's memory beside the whole model.

    The global batch at most, which is all that anyone asks for.
    """
    memory_bytes = scenario.cluster.by_name[device].memory_bytes
    return most_samples(scenario, _whole_model(scenario), scenario.training.global_batch, 1, memory_bytes)


def _whole_model(scenario: Scenario) -> Stage:
    return Stage(0, len(scenario.model.layers), (), in_flight=1)


def _holds_nothing(scenario: Scenario, strategy: str, devices: Sequence[str]) -> InputError:
    largest = max((scenario.cluster.by_name[name] for name in devices), key=lambda device: device.memory_bytes)
    needed = needed_bytes(scenario, _whole_model(scenario), 1, 1)
    return InputError(
        f"the whole model needs {size_text(needed)} for one sample, and device '{largest.name}', the largest, has "
        f"{size_text(largest.memory_bytes)}",
        where=f"strategy '{strategy}'",
        valid=f"{max(1, needed - largest.memory_bytes)} bytes more of memory, or a strategy that splits the model",
    )


def cannikin(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the samples with which they end together, sums included.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "cannikin", with_sums=True)


def lb_bsp(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the samples with which they compute equally long.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "lb-bsp", with_sums=False)


def adaptdl(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the same share.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return even_plan(scenario, "adaptdl")
