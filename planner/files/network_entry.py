"""The ``network`` effects of a scenario."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from planner.files.parsing import STRICT
from planner.files.quantities import Bytes, BytesOrUnlimited, Number, Seconds
from planner.scenario.effects import TCP, WIDE_AREA_TCP, NetworkEffects

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
