"""Reads the ``model`` of a scenario and resolves it to the costs of its layers."""

from dataclasses import field, replace
from itertools import chain

from planner.files.importers.sailor import read_sailor
from planner.files.parsing import Bytes, Flop, Name, Part, Positive, Seconds, file_entry
from planner.scenario.datasheet import DeviceKind
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.roofline import LayerWork, roofline_layer
from planner.scenario.scenario import ModelCode
from traces.common.errors import InputError


@file_entry
class TimesEntry:
    """Times of a layer on one device kind, one per sample count, and of the optimizer's ``update`` of the layer."""

    samples: tuple[Positive, ...]
    forward: tuple[Seconds, ...]
    backward_input: tuple[Seconds, ...]
    backward_weight: tuple[Seconds, ...]
    update: Seconds | None = None


@file_entry
class LayerEntry:
    """A layer (or ``repeat`` equal ones) with its work per sample for the roofline, or its times per device kind."""

    name: Name
    repeat: Positive = 1
    parameters: Bytes
    output: Bytes
    activation: Bytes
    forward: Flop | None = None
    times: dict[str, TimesEntry] | None = None


@file_entry
class SailorEntry:
    """A published profile of eth-easl/sailor: files of layer times and sizes, and the model's name in these files."""

    times: str
    sizes: str
    model: str


@file_entry
class ModelEntry:
    """A model: its layers or a published profile, and the file with its ``code`` for runs with real compute.

    ``precision`` is that in which times and sizes were measured; layers with ``forward`` have the sizes of float32.
    """

    name: Name
    precision: str | None = None
    layers: tuple[LayerEntry, ...] | None = None
    sailor: SailorEntry | None = None
    code: str | None = None
    arguments: dict[str, int | float | str | bool] = field(default_factory=dict)


def read_model(part: Part, kinds: dict[str, DeviceKind], precision: str) -> tuple[ModelProfile, ModelCode | None]:
    """Return the model's costs on these device kinds in a precision, and its code; None without the key ``code``."""
    entry = part.parse(ModelEntry)
    if entry.precision not in (None, precision):
        raise InputError(
            f"the model was measured in {entry.precision}, but is trained in {precision}",
            where=part.where("precision"),
            valid=f"set 'precision: {entry.precision}' in 'training', or measure it with '--precision {precision}'",
        )
    if (entry.layers is None) == (entry.sailor is None):
        raise InputError("the model needs its costs", where=part.where(), valid="give one of 'layers' and 'sailor'")
    if entry.sailor is not None:
        sailor = entry.sailor
        profile = read_sailor(part.path(sailor.times), part.path(sailor.sizes), sailor.model)
        model = ModelProfile(entry.name, profile.layers, profile.sharded)
    else:
        assert entry.layers is not None
        if not entry.layers:
            raise InputError("the model has no layers", where=part.where("layers"), valid="give at least one")
        layers = (_layer(layer, kinds, part, index, precision) for index, layer in enumerate(entry.layers))
        model = ModelProfile(entry.name, tuple(chain.from_iterable(layers)))
    return model, _code(entry, part)


def _code(entry: ModelEntry, part: Part) -> ModelCode | None:
    if entry.code is None:
        return None
    path = part.path(entry.code).resolve()
    if not path.is_file():
        raise InputError(
            f"there is no model file '{entry.code}'",
            where=part.where("code"),
            valid=f"{path} must be a Python file",
        )
    return ModelCode(path, entry.arguments)


def _layer(
    entry: LayerEntry, kinds: dict[str, DeviceKind], part: Part, index: int, precision: str
) -> list[LayerProfile]:
    where = part.where("layers", index)
    if (entry.forward is None) == (entry.times is None):
        raise InputError("the layer needs its compute", where=where, valid="give one of 'forward' and 'times'")
    sizes = (entry.parameters, entry.output, entry.activation)
    try:
        if entry.forward is not None:
            layer = roofline_layer(LayerWork(entry.name, entry.forward, *sizes), kinds.values(), precision)
        else:
            assert entry.times is not None
            tables = {
                kind: TimeTable(times.samples, times.forward, times.backward_input, times.backward_weight)
                for kind, times in entry.times.items()
            }
            updates = {kind: times.update for kind, times in entry.times.items() if times.update is not None}
            layer = LayerProfile(entry.name, *sizes, tables, updates)
    except InputError as error:
        raise error.within(where) from None
    if entry.repeat == 1:
        return [layer]
    names = (f"{entry.name}-{number}" for number in range(entry.repeat))
    return [replace(layer, name=name) for name in names]
