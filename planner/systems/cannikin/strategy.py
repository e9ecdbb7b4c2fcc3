"""Strategies ``cannikin``, ``lb-bsp`` and ``adaptdl``: data parallelism with different divisions of the batch.

Cannikin (arXiv 2402.05302) divides the batch so that all devices end together, gradient sums included. LB-BSP balances
compute alone. AdaptDL (Pollux, OSDI'21) treats all devices as equal, and raises the batch as the gradient gets noisier.
Since a plan keeps the scenario's global batch, the strategy ``adaptdl`` only divides it evenly; reproductions in which
the batch grows choose it with `planner.systems.cannikin.goodput`.

Assumed: all three use the same buckets and rules for microbatches, so that they differ in the division alone.
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
"""Function that returns the samples of a microbatch that each device takes, from: the samples of the microbatch, the
number of microbatches, the names of the devices, and the limit on the samples of each device by its memory."""


def data_parallel_plan(scenario: Scenario, strategy: str, divide: Divide, devices: Sequence[str] = ()) -> Plan:
    """Return a plan of one stage with the fewest equal microbatches that fit into memory, divided by ``divide``.

    Devices without samples are left out. Gradient sums overlap with backward, in buckets as in PyTorch's
    DistributedDataParallel.

    Args:
        scenario: Scenario that gives the global batch and memory.
        strategy: Name of the strategy in the plan.
        divide: Function that gives each device its samples.
        devices: Names of the devices to use; all if empty.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    names = tuple(devices) or tuple(scenario.cluster.by_name)
    most = tuple(fitting_samples(scenario, name) for name in names)
    if not any(most):
        raise _too_large(scenario, strategy, names)
    batch = scenario.training.global_batch
    for count in range(ceil(batch / sum(most)), batch + 1):
        microbatches = even_cut(batch, count)
        samples = divide(microbatches[0], count, names, most)
        plan = plan_of_samples(scenario, strategy, names, samples, microbatches)
        # Checked for all microbatches: rounding may give a device more samples of a smaller one.
        if fitting_depths((1,), plan.pipelines[0].stages, scenario, microbatches) is not None:
            return plan
    raise _too_large(scenario, strategy, names)


def plan_of_samples(
    scenario: Scenario, strategy: str, devices: Sequence[str], samples: Sequence[int], microbatches: tuple[int, ...]
) -> Plan:
    """Return a plan of one stage in which the devices take ``samples`` of the first microbatch.

    Other microbatches are divided in the same ratio. Devices without samples are left out.
    """
    replicas = tuple(Replica(name, float(own)) for name, own in zip(devices, samples, strict=True) if own > 0)
    stage = Stage(0, len(scenario.model.layers), replicas, in_flight=1)
    how = Synchronisation(bucket_bytes=BUCKET_BYTES)
    pipelines = (Pipeline((stage,), microbatches),)
    return Plan(scenario.name, scenario.model.name, strategy, "1f1b", pipelines, synchronisation=how)


def divide_evenly(batch: int, count: int, devices: Sequence[str], most: Sequence[int]) -> Sequence[int]:
    """Return a `Divide` result in which devices that can hold the model differ by at most one sample."""
    even = iter(even_cut(batch, sum(limit > 0 for limit in most)))
    return [next(even) if limit > 0 else 0 for limit in most]


def even_plan(scenario: Scenario, strategy: str) -> Plan:
    """Return the plan in which all devices take the same number of samples, up to rounding.

    Raises:
        InputError: As `data_parallel_plan`.
    """
    return data_parallel_plan(scenario, strategy, divide_evenly)


def balanced_plan(scenario: Scenario, strategy: str, *, with_sums: bool) -> Plan:
    """Return the plan in which devices end together, by the scenario's profile and the declared bandwidths.

    Args:
        scenario: Scenario that the plan is for.
        strategy: Name of the strategy in the plan.
        with_sums: Whether to count gradient sums and their overlap with backward; otherwise balance compute alone.

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
    """Return the times of gradient sums over devices at the declared bandwidths; devices have equal shares."""
    plan = plan_of_samples(scenario, "", devices, [1] * len(devices), (max(batch, len(devices)),) * count)
    return sum_times(plan, scenario, partial(nominal_path, scenario))


def profiled_speed(scenario: Scenario, device: str, most: int) -> NodeSpeed:
    """Return the speed fitted to a device's profile at sample counts from 1 to ``most``, or at 1 if ``most`` is 0.

    The optimizer's update is not included.
    """
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
    """Return the most samples of one microbatch that fit into a device's memory with the whole model.

    The result is at most the global batch, and 0 if the model does not fit.
    """
    memory_bytes = scenario.cluster.by_name[device].memory_bytes
    return most_samples(scenario, _whole_model(scenario), scenario.training.global_batch, 1, memory_bytes)


def _whole_model(scenario: Scenario) -> Stage:
    return Stage(0, len(scenario.model.layers), (), in_flight=1)


def _too_large(scenario: Scenario, strategy: str, devices: Sequence[str]) -> InputError:
    largest = max((scenario.cluster.by_name[name] for name in devices), key=lambda device: device.memory_bytes)
    needed = needed_bytes(scenario, _whole_model(scenario), 1, 1)
    return InputError(
        f"the whole model needs {size_text(needed)} for one sample, and device '{largest.name}', the largest, has "
        f"{size_text(largest.memory_bytes)}",
        where=f"strategy '{strategy}'",
        valid=f"take {max(1, needed - largest.memory_bytes)} bytes more of memory, or a strategy that splits the model",
    )


def cannikin(scenario: Scenario) -> Plan:
    """Return Cannikin's plan: one stage whose replicas end together, gradient sums included.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "cannikin", with_sums=True)


def lb_bsp(scenario: Scenario) -> Plan:
    """Return LB-BSP's plan: one stage whose replicas compute for the same time.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "lb-bsp", with_sums=False)


def adaptdl(scenario: Scenario) -> Plan:
    """Return AdaptDL's plan: one stage whose replicas have the same share.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return even_plan(scenario, "adaptdl")
