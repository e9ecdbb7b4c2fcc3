"""The keys of a scenario's ``cluster``, as plain data."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from planner.files.parsing import STRICT
from planner.files.quantities import (
    BitsPerSecond,
    Bytes,
    BytesPerSecond,
    FlopPerSecond,
    Name,
    NotNegative,
    Number,
    Seconds,
)
from planner.files.trace import TraceEntry


@dataclass(frozen=True, kw_only=True)
class DeviceEntry:
    """A device; its memory is its kind's unless given.

    Attributes:
        name: Unique in the cluster.
        kind: Of the datasheet or of the scenario's own kinds.
        region: Where it stands.
        host: The machine it is in; one of its own if absent.
        interface: Rate of the host's network interface, each way; it never binds if absent.
        memory: Instead of its kind's.
        price_usd_per_hour: US dollars per hour.
    """

    name: Name
    kind: str
    region: Name
    host: Name | None = None
    interface: BitsPerSecond | None = None
    memory: Bytes | None = None
    price_usd_per_hour: NotNegative = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class KindEntry:
    """A device kind that the datasheet does not know."""

    peak: FlopPerSecond
    memory: Bytes
    memory_bandwidth: BytesPerSecond

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SizeCurveEntry:
    """The rate of one message by its size: GB/s as a polynomial of log2(size in MB), and never above the ceiling.

    Attributes:
        quadratic: GB/s.
        linear: GB/s.
        constant: Rate of a message of 1 MB, GB/s.
        ceiling: The highest rate.
    """

    quadratic: Number = 0.0
    linear: Number = 0.0
    constant: Number
    ceiling: BitsPerSecond

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class LinkEntry:
    """A link in both directions (``between``), in one (``from``, ``to``), or inside a region or a host (``inside``).

    Ends are regions, hosts or devices. With a ``size_curve`` and no bandwidth, the curve's ceiling is the bandwidth.

    Attributes:
        jitter: Each packet takes up to so much longer than the latency.
        loss: Share of the packets that are lost, below 1.
    """

    between: tuple[str, str] | None = None
    source: Annotated[str | None, Field(alias="from")] = None
    target: Annotated[str | None, Field(alias="to")] = None
    inside: str | None = None
    bandwidth: BitsPerSecond | None = None
    latency: Seconds
    jitter: Seconds = 0.0
    loss: Number = 0.0
    trace: TraceEntry | None = None
    size_curve: SizeCurveEntry | None = None
    price_usd_per_gb: NotNegative = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class ClusterEntry:
    """Devices, links, and device kinds of the user's own."""

    devices: tuple[DeviceEntry, ...]
    links: tuple[LinkEntry, ...] = ()
    kinds: dict[str, KindEntry] = field(default_factory=dict)

    __pydantic_config__ = STRICT
