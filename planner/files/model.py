"""Reads the ``model`` of a scenario and resolves it to the costs of its layers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, NamedTuple

from pydantic import Field, WithJsonSchema

from planner.files.cluster import read_kind_tables
from planner.files.importers.huggingface import read_config, read_huggingface
from planner.files.importers.sailor import read_sailor
from planner.files.parsing import Bytes, Flop, Name, Number, Part, Positive, Seconds, file_entry
from planner.scenario.datasheet import DeviceKind
from planner.scenario.kind_table import DIVISIONS, KindTable, MatrixProduct
from planner.scenario.profile import (
    NO_SUMS,
    GroupSums,
    LayerProfile,
    ModelProfile,
    PassMemory,
    SplitMemory,
    TimeTable,
    Workspace,
)
from planner.scenario.roofline import LayerWork, roofline_layer, sharded_models
from planner.scenario.scenario import Code, HuggingFaceCode, ModelCode
from planner.scenario.sharding import SHARDINGS, Sharding, named_sharding
from planner.scenario.training import DEFAULT_PRECISION, PRECISIONS
from traces.common.errors import InputError, find_by_name

_Named = Annotated[str, WithJsonSchema({"enum": list(SHARDINGS)})]


@file_entry
class TimesEntry:
    """Times of a layer on one device kind, one per sample count, and of the optimizer's ``update`` of the layer."""

    samples: tuple[Positive, ...]
    forward: tuple[Seconds, ...]
    backward_input: tuple[Seconds, ...]
    backward_weight: tuple[Seconds, ...]
    update: Seconds | None = None


@file_entry
class SumsEntry:
    """Sums over a tensor-parallel group in one pass: their number, and the bytes of a sample in all of them."""

    count: Positive
    bytes: Bytes


@file_entry
class ShardEntry:
    """How a tensor-parallel group divides a layer, in numbers.

    Attributes:
        like: One of the named divisions, which then gives ``activation``, ``fixed``, ``forward`` and ``backward``.
        parts: The number of devices must divide this number; 0 for any number of devices.
        parameters: Parameters that are replicated on every device.
        rows: Rows of a divided table: if the number of devices does not divide it, the layer is replicated.
        activation: Saved activations of a sample that are replicated on every device.
        fixed: The part of ``activation`` that half precision does not make smaller.
        forward: Sums over the group in the forward; none if absent.
        backward: Sums over the group in the input gradient; none if absent.
    """

    like: _Named | None = None
    parts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    parameters: Bytes = 0
    activation: Bytes = 0
    fixed: Bytes = 0
    forward: SumsEntry | None = None
    backward: SumsEntry | None = None
    rows: Annotated[int, Field(ge=0, le=100_000_000)] = 0


@file_entry
class WorkspaceEntry:
    """Bytes that a pass of a layer holds while it runs: ``fixed`` whatever its samples, and ``sample`` for each."""

    fixed: Bytes = 0
    sample: Bytes = 0


@file_entry
class SplitMemoryEntry:
    """Measured memory of a backward that is split in input gradient and weight gradient.

    Attributes:
        deferred: Bytes of a sample that stay from the input gradient to the weight gradient.
        forward: What the forward holds beside the saved activations.
        input: What the input gradient holds beside the saved activations.
        weight: What the weight gradient holds beside ``deferred``.
    """

    deferred: Bytes = 0
    forward: WorkspaceEntry = field(default_factory=WorkspaceEntry)
    input: WorkspaceEntry = field(default_factory=WorkspaceEntry)
    weight: WorkspaceEntry = field(default_factory=WorkspaceEntry)


@file_entry
class MemoryEntry:
    """Measured memory of a layer's passes beside its saved activations.

    Attributes:
        output: Bytes of a sample's output if the layer itself saves it; they count at the end of a stage.
        fixed: Bytes that a pass holds while it runs, whatever its samples.
        sample: Bytes that a pass holds while it runs, for each sample.
        split: Memory of a split backward; without it, all activations are taken to stay until the weight gradient.
    """

    output: Bytes = 0
    fixed: Bytes = 0
    sample: Bytes = 0
    split: SplitMemoryEntry | None = None


@file_entry
class ProductEntry:
    """Matrix products of a layer's forward, each of ``rows`` x ``inner`` with ``inner`` x ``outer``.

    Attributes:
        rows: Rows for one sample, such as its tokens.
        count: Number of such products.
        divide: The size that the devices of a tensor-parallel group divide: ``rows``, ``inner`` or ``outer``.
    """

    rows: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    inner: Positive
    outer: Positive
    count: Positive = 1
    divide: Annotated[str, WithJsonSchema({"enum": list(DIVISIONS)})] = "outer"


@file_entry
class LayerEntry:
    """A layer (or ``repeat`` equal ones) with its work per sample for the roofline, or its times per device kind.

    Attributes:
        fixed: The part of ``activation`` that half precision does not make smaller.
        tied: The part of ``parameters`` that the layer shares with all other layers that have ``tied``, as embedding
            and head of many language models do; each of the layers holds a copy.
        shard: How the devices of a host can divide the layer by tensor parallelism: ``column``, ``row``, ``heads``,
            ``block`` or ``vocabulary``, or in numbers. Without it, the layer is replicated on all of them.
        memory: Measured memory of the passes; without it, ``workspace_share`` of the scenario's effects.
        products: Matrix products of the forward, whose shapes a table of ``roofline`` needs.
        kernels: Number of kernels of the forward; 0 if it is not known.
    """

    name: Name
    repeat: Positive = 1
    parameters: Bytes
    output: Bytes
    activation: Bytes
    forward: Flop | None = None
    times: dict[str, TimesEntry] | None = None
    fixed: Bytes = 0
    tied: Bytes = 0
    shard: _Named | ShardEntry | None = None
    memory: MemoryEntry | None = None
    products: tuple[ProductEntry, ...] = ()
    kernels: Annotated[int, Field(ge=0, le=1_000_000)] = 0


@file_entry
class SailorEntry:
    """A published profile of eth-easl/sailor: files of layer times and sizes, and the model's name in these files."""

    times: str
    sizes: str
    model: str


@file_entry
class ModelEntry:
    """A model: its layers, a published profile, or a Hugging Face ``config.json`` for samples of ``tokens`` tokens.

    Attributes:
        layers: The layers in order; of a ``huggingface`` model if they were measured.
        precision: The precision in which times and sizes were measured, fp32 if absent; layers with ``forward`` have
            float32 sizes.
        measured_on: The device on which the times of each kind were measured, in words, by the kind.
        roofline: Files of ``ropebridge profile kind``, with the measured rates of one kind each; the roofline of other
            kinds uses their datasheet.
        code: The file with the model's code, for runs with real compute; a ``huggingface`` model needs none.
        weights: A safetensors file, a folder of such files, or the index of several, with the first weights of a
            ``huggingface`` model; random weights if absent.
    """

    name: Name
    precision: Annotated[str, WithJsonSchema({"enum": list(PRECISIONS)})] | None = None
    layers: tuple[LayerEntry, ...] | None = None
    sailor: SailorEntry | None = None
    huggingface: str | None = None
    tokens: Positive | None = None
    weights: str | None = None
    measured_on: dict[str, str] = field(default_factory=dict)
    roofline: tuple[str, ...] = ()
    code: str | None = None
    arguments: dict[str, int | Number | str | bool] = field(default_factory=dict)


def read_model(
    part: Part, kinds: dict[str, DeviceKind], precision: str, most_devices: int = 1
) -> tuple[ModelProfile, Code | None]:
    """Return the model's costs on these device kinds in a precision, and what trains it, if anything does.

    ``most_devices`` is the largest number of devices that a tensor-parallel group can have: those of a host.
    """
    entry = part.parse(ModelEntry)
    _check_precision(entry, precision, part)
    # Layers that were measured take the place of those of a config.json, which then says what is trained only.
    costs = (entry.huggingface if entry.layers is None else entry.layers, entry.sailor)
    if sum(each is not None for each in costs) != 1:
        raise InputError(
            "the model needs its costs",
            where=part.where(),
            valid="give one of 'layers', 'sailor' and 'huggingface'",
        )
    if (entry.tokens is None) != (entry.huggingface is None):
        raise InputError(
            "'tokens' and 'huggingface' belong together",
            where=part.where(),
            valid="give 'tokens: 2048', the length of a sample, with a 'huggingface' config.json, and only with it",
        )
    _check_roofline(entry, part)
    if entry.sailor is not None:
        sailor = entry.sailor
        profile = read_sailor(part.path(sailor.times), part.path(sailor.sizes), sailor.model)
        return ModelProfile(entry.name, profile.layers, profile.sharded), _code(entry, part)
    layers = _huggingface(entry, part) if entry.layers is None else _layers(entry.layers, part)
    tables = _tables(entry, part, kinds, precision)
    profiles = []
    for layer, where in layers:
        try:
            made = roofline_layer(layer, kinds.values(), precision, tables) if isinstance(layer, LayerWork) else layer
        except InputError as error:
            raise error.within(where) from None
        profiles.append(made)
    works = [layer for layer, _ in layers if isinstance(layer, LayerWork)]
    sharded = {}
    if len(works) == len(layers):
        sharded = sharded_models(entry.name, works, kinds.values(), precision, most_devices, tables)
    return ModelProfile(entry.name, tuple(profiles), sharded), _code(entry, part)


def _check_roofline(entry: ModelEntry, part: Part) -> None:
    """Raise `InputError` if there are tables, but no layer of which a roofline estimates the times."""
    counted = entry.layers is None and entry.huggingface is not None
    counted |= any(layer.forward is not None for layer in entry.layers or ())
    if entry.roofline and not counted:
        raise InputError(
            "the model's times are measured, so that no roofline is used",
            where=part.where("roofline"),
            valid="remove 'roofline', or give the layers their operations as 'forward'",
        )


def _tables(entry: ModelEntry, part: Part, kinds: Mapping[str, DeviceKind], precision: str) -> Mapping[str, KindTable]:
    places = [(part.path(file), part.where("roofline", index)) for index, file in enumerate(entry.roofline)]
    return read_kind_tables(places, list(kinds), precision, part.where("roofline"))


def _check_precision(entry: ModelEntry, precision: str, part: Part) -> None:
    """Raise `InputError` if the model's costs were measured in another precision than that of the training."""
    where, measured, note = part.where(), DEFAULT_PRECISION, " (no 'precision:' is given)"
    if entry.precision is not None:
        where, measured, note = part.where("precision"), entry.precision, ""
        find_by_name(measured, PRECISIONS, "precision", where=where)
    is_measured = entry.sailor is not None or any(layer.times is not None for layer in entry.layers or ())
    if measured != precision and (is_measured or entry.precision is not None):
        raise InputError(
            f"the model was measured in {measured}{note}, but is trained in {precision}",
            where=where,
            valid=f"set 'precision: {measured}' in 'training', or give the model times and sizes that were measured in "
            f"{precision}, with 'precision: {precision}'",
        )


def _code(entry: ModelEntry, part: Part) -> Code | None:
    if entry.weights is not None and (entry.huggingface is None or entry.code is not None):
        raise InputError(
            "'weights' are those of a 'huggingface' model without 'code'",
            where=part.where("weights"),
            valid="remove 'weights', and load them in the model's code",
        )
    if entry.code is None:
        return _huggingface_code(entry, part)
    path = part.path(entry.code).resolve()
    if not path.is_file():
        raise InputError(
            f"there is no model file '{entry.code}'",
            where=part.where("code"),
            valid=f"{path} must be a Python file",
        )
    return ModelCode(path, entry.arguments)


def _huggingface_code(entry: ModelEntry, part: Part) -> HuggingFaceCode | None:
    if entry.huggingface is None:
        return None
    assert entry.tokens is not None, "it was checked"
    source = part.path(entry.huggingface).resolve()
    weights = None if entry.weights is None else part.path(entry.weights).resolve()
    if weights is not None and not weights.exists():
        raise InputError(
            f"there are no weights '{entry.weights}'",
            where=part.where("weights"),
            valid=f"{weights} must be a safetensors file, a folder of such files, or their index",
        )
    return HuggingFaceCode(source, read_config(source), entry.tokens, weights)


# A layer by its work or by its measured times, with its place in a file.
_Layer = tuple[LayerProfile | LayerWork, str]


def _huggingface(entry: ModelEntry, part: Part) -> list[_Layer]:
    assert entry.huggingface is not None, "it was checked"
    assert entry.tokens is not None, "it was checked"
    shape = read_huggingface(part.path(entry.huggingface))
    try:
        layers = shape.layers(entry.tokens)
    except InputError as error:
        raise InputError(error.problem, part.where("tokens"), error.valid) from None
    numbers = Counter(layer.name for layer in layers)
    named = (
        replace(layer, name=f"{layer.name}-{index}") if numbers[layer.name] > 1 else layer
        for index, layer in enumerate(layers)
    )
    return [(layer, part.where("huggingface")) for layer in named]


# More than the deepest networks have; the search's tables grow with the square, to gigabytes at several thousand.
_MOST_LAYERS = 1_000


def _layers(entries: Sequence[LayerEntry], part: Part) -> list[_Layer]:
    if not entries:
        raise InputError("the model has no layers", where=part.where("layers"), valid="give at least one")
    if (count := sum(entry.repeat for entry in entries)) > _MOST_LAYERS:
        valid = f"{_MOST_LAYERS:,} are possible: make one layer of several"
        raise InputError(f"the model has {count:,} layers", where=part.where("layers"), valid=valid)
    layers: list[_Layer] = []
    input_bytes = 0
    for index, entry in enumerate(entries):
        where, last = part.where("layers", index), len(entries) - 1
        # From the second of equal layers on, the input is the output of another one.
        places = [
            _Place(
                entry.output if number else input_bytes,
                index == number == 0,
                (index, number) == (last, entry.repeat - 1),
            )
            for number in range(entry.repeat)
        ]
        layers += [(layer, where) for layer in _repeated(entry, where, places)]
        input_bytes = entry.output
    return layers


class _Place(NamedTuple):
    """The place of a layer in the model; ``input_bytes`` is the size of its input for one sample."""

    input_bytes: int
    is_first: bool
    is_last: bool


def _repeated(entry: LayerEntry, where: str, places: Sequence[_Place]) -> Sequence[LayerProfile | LayerWork]:
    """Return the layer of an entry at each of its places."""
    if (entry.forward is None) == (entry.times is None):
        raise InputError("the layer needs its compute", where=where, valid="give one of 'forward' and 'times'")
    sizes = (entry.parameters, entry.output, entry.activation)
    layers: list[LayerProfile | LayerWork]
    try:
        if entry.forward is not None:
            if entry.memory is not None:
                raise InputError("memory is measured with times", "memory", "remove it, or give 'times'")
            work = LayerWork(
                entry.name,
                entry.forward,
                *sizes,
                fixed_bytes=entry.fixed,
                tied_bytes=entry.tied,
                products=tuple(map(_product, entry.products)),
                kernels=entry.kernels,
            )
            layers = [replace(work, sharding=_sharding(entry, place)) for place in places]
        else:
            layers = [_measured(entry)] * len(places)
    except InputError as error:
        raise error.within(where) from None
    if len(layers) == 1:
        return layers
    return [replace(layer, name=f"{entry.name}-{number}") for number, layer in enumerate(layers)]


def _product(entry: ProductEntry) -> MatrixProduct:
    find_by_name(entry.divide, dict.fromkeys(DIVISIONS), "division", where="products")
    return MatrixProduct(entry.rows, entry.inner, entry.outer, entry.count, entry.divide)


def _measured(entry: LayerEntry) -> LayerProfile:
    assert entry.times is not None
    if entry.products or entry.kernels:
        key = "products" if entry.products else "kernels"
        raise InputError("a layer with measured times has no use for this", key, f"remove '{key}', or give 'forward'")
    if entry.shard is not None:
        raise InputError("a layer with measured times cannot be divided", "shard", "remove 'shard', or give 'forward'")
    tables = {
        kind: TimeTable(times.samples, times.forward, times.backward_input, times.backward_weight)
        for kind, times in entry.times.items()
    }
    updates = {kind: times.update for kind, times in entry.times.items() if times.update is not None}
    memory = None if entry.memory is None else _memory(entry.memory)
    sizes = (entry.parameters, entry.output, entry.activation)
    return LayerProfile(entry.name, *sizes, tables, updates, memory=memory, tied_bytes=entry.tied)


def _memory(entry: MemoryEntry) -> PassMemory:
    split = None
    if entry.split is not None:
        passes = (entry.split.forward, entry.split.input, entry.split.weight)
        split = SplitMemory(entry.split.deferred, *(Workspace(each.fixed, each.sample) for each in passes))
    return PassMemory(entry.output, Workspace(entry.fixed, entry.sample), split)


def _sharding(entry: LayerEntry, place: _Place) -> Sharding | None:
    shard = entry.shard
    if shard is None:
        return None
    if isinstance(shard, str):
        shard = ShardEntry(like=shard)
        where = "shard"
    else:
        where = "shard.like"
    if shard.like is not None:
        find_by_name(shard.like, dict.fromkeys(SHARDINGS), "sharding", where=where)
        if (shard.activation, shard.fixed, shard.forward, shard.backward) != (0, 0, None, None):
            valid = "give only 'parts' and 'parameters' beside 'like'"
            raise InputError("a named division gives the activations and sums itself", "shard", valid)
        if shard.like == "vocabulary" and not (place.is_first or place.is_last):
            valid = "choose another division: only the first and the last layer have one"
            raise InputError("a layer in the middle of the model has no vocabulary", where, valid)
        return named_sharding(
            shard.like,
            place.input_bytes,
            entry.output,
            entry.activation,
            parts=shard.parts,
            is_first=place.is_first,
            parameter_bytes=shard.parameters,
            fixed_bytes=entry.fixed,
        )
    forward, backward = (
        NO_SUMS if sums is None else GroupSums(sums.count, sums.bytes) for sums in (shard.forward, shard.backward)
    )
    return Sharding(shard.parts, shard.parameters, shard.activation, forward, backward, shard.fixed, shard.rows)
