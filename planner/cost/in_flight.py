"""Depths, the limits of microbatches in flight at each stage, and the error if no split of a model fits into memory."""

from collections.abc import Sequence
from math import ceil

from planner.cost.memory import most_in_flight, needed_bytes, saved_activation_bytes, state_bytes
from planner.plan.plan import Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError
from traces.common.units import size_text


def plain_depths(stages: int) -> tuple[int, ...]:
    """Return the depths of 1F1B on links without latency: P - s for stage s, counted from 0, of P stages."""
    return tuple(stages - stage for stage in range(stages))


def latency_aware_depths(
    compute_s: Sequence[float], transfer_s: Sequence[float], latency_s: Sequence[float]
) -> tuple[int, ...]:
    """Return the depths that hide round trips: K_s = max(P - s, ceil(R_s / T_max)).

    R_s is the time from the start of a microbatch's forward at stage s (of P stages) to the end of its backward at this
    stage: the ``compute_s`` of stages s and later, plus twice the ``transfer_s`` and ``latency_s`` of the links after
    stage s. T_max is the largest ``compute_s`` or ``transfer_s``. The formula is an assumption, since DeepCEE (arXiv
    2505.15536) gives none.

    Args:
        compute_s: Forward and backward of one microbatch on each stage, seconds, shape [stages].
        transfer_s: Time for which one microbatch's activations keep each link busy, seconds, shape [stages - 1].
        latency_s: One-way latency of each link, seconds, shape [stages - 1].
    """
    stages = len(compute_s)
    slowest_s = max([*compute_s, *transfer_s])
    if slowest_s == 0:
        return plain_depths(stages)
    depths = []
    for stage in range(stages):
        round_trip_s = sum(compute_s[stage:]) + 2 * (sum(transfer_s[stage:]) + sum(latency_s[stage:]))
        depths.append(max(stages - stage, ceil(round_trip_s / slowest_s - 1e-9)))
    return tuple(depths)


def fitting_depths(
    depths: Sequence[int], stages: Sequence[Stage], scenario: Scenario, microbatches: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the largest depths, non-increasing from stage to stage, that three limits allow.

    The limits of a stage are its entry of ``depths``, the number of microbatches, and the number of microbatches that
    fit into the memory of its devices. Returns None if not even one microbatch fits into the memory of some stage.
    """
    fitted: list[int] = []
    for depth, stage in zip(depths, stages, strict=True):
        ceiling = min([depth, len(microbatches), *fitted[-1:]])
        for replica, samples in zip(stage.replicas, stage.most_samples(microbatches), strict=True):
            memory_bytes = min(scenario.cluster.by_name[device].memory_bytes for device in replica.devices)
            held = most_in_flight(scenario, stage, samples, memory_bytes, replica.tensor_parallel)
            ceiling = int(min(ceiling, held))
        if ceiling < 1:
            return None
        fitted.append(ceiling)
    return tuple(fitted)


def no_split_fits(scenario: Scenario, strategy: str, devices: Sequence[Device] | None = None) -> InputError:
    """Return the error for a strategy that found no split of the model that fits into memory.

    The message names the first layer that fits on no device, and the device with the most memory. If every layer fits
    alone, the message gives the bytes that all layers need together, and the bytes that all devices have. ``devices``
    are those that the strategy may use; None for all devices of the scenario.
    """
    devices = scenario.cluster.devices if devices is None else devices
    if not devices:
        return InputError("no device is left", where=f"strategy '{strategy}'", valid="wait until one returns")
    largest = max(devices, key=lambda device: device.memory_bytes)
    stages = [Stage(index, index + 1, (), in_flight=1) for index in range(len(scenario.model.layers))]
    for stage, layer in zip(stages, scenario.model.layers, strict=True):
        needed = max(needed_bytes(scenario, stage, 1, 1), layer.output_bytes)
        if needed > largest.memory_bytes:
            return InputError(
                f"no split fits into memory: layer {stage.first_layer} ('{layer.name}') alone needs "
                f"{size_text(needed)} for one sample, and device '{largest.name}', the largest, has "
                f"{size_text(largest.memory_bytes)}",
                where=f"strategy '{strategy}'",
                valid=f"{needed - largest.memory_bytes} bytes more of memory, or a smaller layer",
            )
    whole = Stage(0, len(stages), (), in_flight=1)
    needed = state_bytes(scenario, 0, len(stages)) + saved_activation_bytes(scenario, whole)
    room = sum(device.memory_bytes for device in devices)
    return InputError(
        f"no split fits into memory: all layers need {size_text(needed)} for one sample, and {len(devices)} devices "
        f"have {size_text(room)} together",
        where=f"strategy '{strategy}'",
        valid=f"{needed - room} bytes more of memory" if needed > room else "smaller microbatches, or other devices",
    )
