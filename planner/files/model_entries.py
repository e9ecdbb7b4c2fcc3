"""The keys of a scenario's ``model``, as plain data."""

from dataclasses import dataclass, field

from planner.files.parsing import STRICT
from planner.files.quantities import Bytes, Flop, Name, Positive, Seconds


@dataclass(frozen=True, kw_only=True)
class TimesEntry:
    """Times of a layer on one device kind, a row per sample count, and of the optimizer's ``update`` of it."""

    samples: tuple[Positive, ...]
    forward: tuple[Seconds, ...]
    backward_input: tuple[Seconds, ...]
    backward_weight: tuple[Seconds, ...]
    update: Seconds | None = None

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
