"""Strategies ``cannikin``, ``lb-bsp`` and ``adaptdl``: data parallelism with different divisions of the batch.

- ``cannikin`` (arXiv 2402.05302) divides the batch so that all devices end together, gradient sums included.
- ``lb-bsp`` divides it so that all devices compute for the same time.
- ``adaptdl`` (Pollux, OSDI'21) treats all devices as equal. The original raises the batch as the gradient gets noisier;
  a plan has the scenario's batch, which only `planner.systems.cannikin.policy.AdaptdlPolicy` changes.

Assumption: all three use the same buckets and rules for microbatches, so that they differ in the division alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

from planner.cost.in_flight import fitting_depths
from planner.cost.layers import with_launches
from planner.cost.memory import most_samples, needed_bytes
from planner.cost.network import nominal_path
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.opt_perf import opt_perf
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed, SumTimes, fit_speed, sum_times
from traces.common.errors import InputError
from traces.common.units import size_text

# Default bucket size of PyTorch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20

# Approximate number of sample counts of a profile to which a line is fitted.
_FITTED_COUNTS = 16

Divide = Callable[[int, int, Sequence[str], Sequence[int]], Sequence[int]]
"""Function that divides a microbatch over devices. Arguments: samples of the microbatch, number of microbatches, names
of the devices, and number of samples that fit into the memory of each device. Result: samples of each device."""


def data_parallel_plan(scenario: Scenario, strategy: str, divide: Divide, devices: Sequence[str] = ()) -> Plan:
    """Return a data-parallel plan of one stage, with the fewest equal microbatches that fit into memory.

    Devices without samples are left out. Gradient sums overlap with backward, in buckets of `BUCKET_BYTES`.

    Args:
        scenario: Scenario that gives the global batch and memory.
        strategy: Name of the strategy in the plan.
        divide: Function that divides each microbatch over the devices.
        devices: Names of the devices to use; all if empty.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    names = tuple(devices) or tuple(scenario.cluster.by_name)
    most = tuple(fitting_samples(scenario, name) for name in names)
    batch = scenario.training.global_batch
    for count in range(ceil(batch / sum(most)), batch + 1) if any(most) else ():
        microbatches = even_cut(batch, count)
        samples = divide(microbatches[0], count, names, most)
        plan = plan_of_samples(scenario, strategy, names, samples, microbatches)
        # `divide` respects memory for the first microbatch; rounding may give a device more samples of another one.
        if fitting_depths((1,), plan.pipelines[0].stages, scenario, microbatches) is not None:
            return plan
    largest = max((scenario.cluster.by_name[name] for name in names), key=lambda device: device.memory_bytes)
    needed = needed_bytes(scenario, _whole_model(scenario), 1, 1)
    raise InputError(
        f"the whole model needs {size_text(needed)} for one sample, and device '{largest.name}', the largest, has "
        f"{size_text(largest.memory_bytes)}",
        where=f"strategy '{strategy}'",
        valid=f"take {max(1, needed - largest.memory_bytes)} bytes more of memory, or a strategy that splits the model",
    )


def plan_of_samples(
    scenario: Scenario, strategy: str, devices: Sequence[str], samples: Sequence[int], microbatches: tuple[int, ...]
) -> Plan:
    """Return a plan of one stage whose replicas divide every microbatch in the ratio of ``samples``.

    Devices without samples are left out.
    """
    replicas = tuple(Replica(name, float(own)) for name, own in zip(devices, samples, strict=True) if own > 0)
    stage = Stage(0, len(scenario.model.layers), replicas, in_flight=1)
    how = Synchronisation(bucket_bytes=BUCKET_BYTES)
    pipelines = (Pipeline((stage,), microbatches),)
    return Plan(scenario.name, scenario.model.name, strategy, "1f1b", pipelines, synchronisation=how)


def divide_evenly(batch: int, count: int, devices: Sequence[str], most: Sequence[int]) -> Sequence[int]:
    """Divide a microbatch evenly over the devices that can hold the model; the arguments are those of `Divide`."""
    even = iter(even_cut(batch, sum(limit > 0 for limit in most)))
    return [next(even) if limit > 0 else 0 for limit in most]


def adaptdl(scenario: Scenario) -> Plan:
    """Return AdaptDL's plan: one stage whose replicas take the same number of samples, up to rounding.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return data_parallel_plan(scenario, "adaptdl", divide_evenly)


def cannikin(scenario: Scenario) -> Plan:
    """Return Cannikin's plan: one stage whose replicas end together, gradient sums included.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return data_parallel_plan(scenario, "cannikin", partial(_balance, scenario, True))


def lb_bsp(scenario: Scenario) -> Plan:
    """Return LB-BSP's plan: one stage whose replicas compute for the same time.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return data_parallel_plan(scenario, "lb-bsp", partial(_balance, scenario, False))


def _balance(
    scenario: Scenario, with_sums: bool, batch: int, count: int, devices: Sequence[str], most: Sequence[int]
) -> Sequence[int]:
    """Divide a microbatch so that devices end together by the profile and the declared bandwidths.

    ``with_sums`` tells whether gradient sums and their overlap with backward count; other arguments are `Divide`'s.
    """
    speeds = [
        profiled_speed(scenario, name, min(batch, limit)).over_step(count, update_s(scenario, name))
        for name, limit in zip(devices, most, strict=True)
    ]
    sums = nominal_sums(scenario, devices, batch, count) if with_sums else NO_SUMS
    return opt_perf(batch, speeds, sums, most).samples


def nominal_sums(scenario: Scenario, devices: Sequence[str], batch: int, count: int = 1) -> SumTimes:
    """Return the times of gradient sums over devices with equal shares, at the declared bandwidths.

    ``batch`` is the samples of a microbatch, ``count`` the number of microbatches.
    """
    plan = plan_of_samples(scenario, "", devices, [1] * len(devices), (max(batch, len(devices)),) * count)
    return sum_times(plan, scenario, partial(nominal_path, scenario))


def profiled_speed(scenario: Scenario, device: str, most: int) -> NodeSpeed:
    """Return the speed fitted to a device's profile at sample counts from 1 to ``most``, without optimizer updates."""
    kind, layers = scenario.cluster.by_name[device].kind, len(scenario.model.layers)
    counts = sorted({max(1, round(most * part / _FITTED_COUNTS)) for part in range(1, _FITTED_COUNTS + 1)} | {1})
    times = [with_launches(scenario.model.times(0, layers, kind, count), scenario) for count in counts]
    # Lines are fitted to relative errors, so a time of 0 s counts as 1e-12 s.
    least_s = 1e-12
    forward_s = [max(least_s, each.forward_s) for each in times]
    backward_s = [max(least_s, each.backward_s) for each in times]
    return fit_speed(counts, forward_s, backward_s)


def update_s(scenario: Scenario, device: str) -> float:
    """Return the time of the optimizer's update of the whole model on a device, seconds."""
    return scenario.model.update_s(0, len(scenario.model.layers), scenario.cluster.by_name[device].kind)


def fitting_samples(scenario: Scenario, device: str) -> int:
    """Return the largest microbatch, up to the largest global batch, that fits into a device with the whole model.

    The result is in samples, and 0 if not even one sample fits.
    """
    memory_bytes = scenario.cluster.by_name[device].memory_bytes
    return most_samples(scenario, _whole_model(scenario), scenario.training.largest_batch, 1, memory_bytes)


def _whole_model(scenario: Scenario) -> Stage:
    return Stage(0, len(scenario.model.layers), (), in_flight=1)
