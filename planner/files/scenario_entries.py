"""The keys of a scenario file, as plain data; `planner.files.scenario_file` turns them into a `Scenario`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from planner.files.parsing import STRICT
from planner.files.quantities import BitsPerSecond, Bytes, BytesPerSecond, Flop, FlopPerSecond, Seconds
from planner.files.trace_entry import TraceEntry

Positive = Annotated[int, Field(ge=1, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Names stand in messages, tables and file names: some text, on one line.
Name = Annotated[str, Field(pattern=r"^\S(.*\S)?$", max_length=100)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class DeviceEntry:
    """A device; its memory is its kind's unless given."""

    name: Name
    kind: str
    region: Name
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
class LinkEntry:
    """A link in both directions (``between``), in one (``from``, ``to``), or inside a region (``inside``)."""

    between: tuple[str, str] | None = None
    source: Annotated[str | None, Field(alias="from")] = None
    target: Annotated[str | None, Field(alias="to")] = None
    inside: str | None = None
    bandwidth: BitsPerSecond | None = None
    latency: Seconds
    trace: TraceEntry | None = None
    price_usd_per_gb: NotNegative = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class ClusterEntry:
    """Devices, links, and device kinds of the user's own."""

    devices: tuple[DeviceEntry, ...]
    links: tuple[LinkEntry, ...] = ()
    kinds: dict[str, KindEntry] = field(default_factory=dict)

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TimesEntry:
    """Times of a layer on one device kind, a row per sample count."""

    samples: tuple[Positive, ...]
    forward: tuple[Seconds, ...]
    backward_input: tuple[Seconds, ...]
    backward_weight: tuple[Seconds, ...]

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class LayerEntry:
    """A layer (or ``repeat`` equal ones): its work per sample for the roofline, or its times per device kind."""

    name: Name
    repeat: Positive = 1
    parameters: Bytes
    output: Bytes
    activation: Bytes
    forward: Flop | None = None
    times: dict[str, TimesEntry] | None = None

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SailorEntry:
    """A published profile: files with layer times and sizes, and the model's name in them."""

    times: str
    sizes: str
    model: str

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model: its layers or a published profile, and its code where it is to be trained for real."""

    name: Name
    layers: tuple[LayerEntry, ...] | None = None
    sailor: SailorEntry | None = None
    code: str | None = None
    arguments: dict[str, int | float | str | bool] = field(default_factory=dict)

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """The update rule: its name, learning_rate, momentum and weight_decay, all without unit."""

    name: Literal["sgd", "momentum", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TrainingEntry:
    """Batch, update rule, precision and seed."""

    global_batch: Positive
    microbatch: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    optimizer: OptimizerEntry = field(default_factory=OptimizerEntry)
    precision: Literal["fp32"] = "fp32"
    seed: Seed = 0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class ScenarioEntry:
    """A whole scenario; each part stands here or is the path of a file that holds it."""

    name: Name
    cluster: ClusterEntry | str
    model: ModelEntry | str
    training: TrainingEntry | str

    __pydantic_config__ = STRICT
