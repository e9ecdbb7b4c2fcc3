"""What a strategy says when no split of the model fits into the memory of the devices it may use."""

from collections.abc import Sequence

from planner.cost.in_flight import fitting_depths
from planner.cost.memory import needed_bytes, stage_bytes
from planner.plan.plan import Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError
from traces.common.units import size_text


def no_split_fits(scenario: Scenario, strategy: str, devices: Sequence[Device] = ()) -> InputError:
    """Return the refusal of a strategy that found no split that fits.

    It names the layer that fits nowhere, with the device that comes closest; or, where every layer fits somewhere by
    itself, the bytes that all layers need together.

    Args:
        scenario: Gives model, memory and optimizer.
        strategy: Whose refusal it is.
        devices: Those that it may use; all if empty.
    """
    devices = devices or scenario.cluster.devices
    largest = max(devices, key=lambda device: device.memory_bytes)
    for index, layer in enumerate(scenario.model.layers):
        stage = Stage(index, index + 1, (Replica(largest.name),), in_flight=1)
        if fitting_depths((1,), (stage,), scenario, (1,)) is None:
            needed = needed_bytes(scenario, stage, 1, 1)
            return InputError(
                f"no split fits into memory: layer {index} ('{layer.name}') alone needs {size_text(needed)} for one "
                f"sample, and device '{largest.name}', the largest, has {size_text(largest.memory_bytes)}",
                where=f"strategy '{strategy}'",
                valid=f"{needed - largest.memory_bytes} bytes more of memory, or a smaller layer",
            )
    stages = [
        Stage(index, index + 1, (Replica(largest.name),), in_flight=1) for index in range(len(scenario.model.layers))
    ]
    needed = sum(stage_bytes(scenario, stage, 1, 1) for stage in stages)
    room = sum(device.memory_bytes for device in devices)
    return InputError(
        f"no split fits into memory: all layers need {size_text(needed)} for one sample, and {len(devices)} devices "
        f"have {size_text(room)} together",
        where=f"strategy '{strategy}'",
        valid=f"{needed - room} bytes more of memory" if needed > room else "smaller microbatches, or other devices",
    )
