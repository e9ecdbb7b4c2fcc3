"""The ``effects`` of a scenario: what happens to bytes, compute and memory beside the nominal values."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from planner.files.compute_effects import ComputeEntry, compute_effects
from planner.files.parsing import STRICT, Bytes, BytesOrUnlimited, NotNegative, Number, Part, Seconds
from planner.scenario.cluster import Cluster
from planner.scenario.effects import TCP, WIDE_AREA_TCP, Effects, MemoryEffects, NetworkEffects
from traces.common.errors import InputError

BASES = {"ideal": NetworkEffects(), "tcp": TCP, "tcp-wide-area": WIDE_AREA_TCP}


@dataclass(frozen=True, kw_only=True)
class NetworkEntry:
    """The effects of a base, and those that differ from it.

    Attributes:
        base: ``ideal`` (none), ``tcp`` (what was measured of Linux as it comes) or ``tcp-wide-area`` (the same where
            windows stay open on idle connections, as on the hosts of the emulated links).
        share: Share of a link's measured rate that a training job reaches.
        payload_efficiency: Share of a link's bits that is payload.
        window: Of one connection, or ``unlimited``.
        ready_notice: Whether a transfer waits for the receiver's notice.
        cold_start: Whether an idle connection starts slowly.
        idle: After how long a connection counts as idle.
        initial_window: With which an idle connection starts.
    """

    base: Literal["ideal", "tcp", "tcp-wide-area"] = "ideal"
    share: Number | None = None
    payload_efficiency: Number | None = None
    window: BytesOrUnlimited | None = None
    ready_notice: bool | None = None
    cold_start: bool | None = None
    idle: Seconds | None = None
    initial_window: Bytes | None = None

    __pydantic_config__ = STRICT


class OrBase:
    """Lets the name of a base alone stand for the entry that only names it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def entry(value: object) -> object:
            return {"base": value} if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(entry, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(BASES)}, handler(schema)]}


def network_effects(entry: NetworkEntry) -> NetworkEffects:
    """Return the effects that an entry denotes.

    Raises:
        InputError: A value is out of range.
    """
    changes = {
        "share": entry.share,
        "payload_efficiency": entry.payload_efficiency,
        "window_bytes": entry.window,
        "ready_notice": entry.ready_notice,
        "cold_start": entry.cold_start,
        "idle_s": entry.idle,
        "initial_window_bytes": None if entry.initial_window is None else float(entry.initial_window),
    }
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(BASES[entry.base], **given)


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
