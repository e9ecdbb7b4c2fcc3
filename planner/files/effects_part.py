"""The ``effects`` of a scenario: what happens to bytes, compute and memory beside the nominal values."""

from dataclasses import dataclass, field
from typing import Annotated

from planner.files.compute_entry import ComputeEntry, compute_effects
from planner.files.network_entry import NetworkEntry, OrBase, network_effects
from planner.files.parsing import STRICT
from planner.files.parts import Part
from planner.files.quantities import Bytes, NotNegative
from planner.scenario.cluster import Cluster
from planner.scenario.effects import Effects
from planner.scenario.memory_effects import MemoryEffects
from traces.common.errors import InputError


@dataclass(frozen=True, kw_only=True)
class MemoryEntry:
    """What a framework takes of each device's memory.

    Attributes:
        framework: Whatever the device computes.
        workspace_share: While one layer's backward runs, relative to the activations that the layer keeps.
    """

    framework: Bytes = 0
    workspace_share: NotNegative = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class EffectsEntry:
    """Effects on the network (``ideal``, ``tcp``, ``tcp-wide-area``, or one by one), on compute and on memory."""

    network: Annotated[NetworkEntry, OrBase()] = field(default_factory=NetworkEntry)
    compute: ComputeEntry = field(default_factory=ComputeEntry)
    memory: MemoryEntry = field(default_factory=MemoryEntry)

    __pydantic_config__ = STRICT


def read_effects(part: Part, cluster: Cluster) -> Effects:
    """Return the effects.

    Raises:
        InputError: A value is out of range, a device is not there, or a file is wrong; with its place.
    """
    entry = part.parse(EffectsEntry)
    try:
        network = network_effects(entry.network)
    except InputError as error:
        raise error.within(part.where("network")) from None
    memory = MemoryEffects(entry.memory.framework, entry.memory.workspace_share)
    return Effects(network, compute_effects(entry.compute, cluster, part), memory)
