"""Reads scenarios as people write them in YAML and resolves them to plain data in SI units."""

from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from planner.cluster import Cluster, ClusterError, Device, Link
from planner.datasheet import DATASHEET, DeviceKind, find_kind
from planner.files.documents import Document, Location
from planner.files.parsing import parse
from planner.files.scenario_entries import (
    ClusterEntry,
    DeviceEntry,
    LayerEntry,
    LinkEntry,
    ModelEntry,
    Name,
    ScenarioEntry,
    TrainingEntry,
)
from planner.files.trace_entry import read_trace_entry
from planner.importers.sailor import read_sailor
from planner.profile import LayerProfile, ModelProfile, TimeTable
from planner.roofline import LayerWork, roofline_layer
from planner.scenario import ModelCode, Optimizer, Scenario, Training
from traces.errors import InputError
from traces.naming import unknown_name

Entry = TypeVar("Entry")


def read_scenario(path: Path) -> Scenario:
    """Return the scenario in a YAML file, and in the files that it names.

    Raises:
        InputError: The first thing that is wrong, with file, line, key, value and what would be valid.
    """
    document = Document(path)
    value = document.value
    if not isinstance(value, dict):
        raise InputError("this is not a scenario", where=str(path), valid="write keys: name, cluster, model, training")
    keys = [field.name for field in fields(ScenarioEntry)]
    for key in value:
        if key not in keys:
            raise unknown_name("key", str(key), keys, where=document.where((key,)))
    for key in keys:
        if key not in value:
            raise InputError(f"the key '{key}' is missing", where=str(path), valid=f"add '{key}:'")
    name = parse(Name, document, value["name"], ("name",))
    cluster_part = _Part(document, "cluster")
    cluster_entry = cluster_part.parse(ClusterEntry)
    kinds = _device_kinds(cluster_entry, cluster_part)
    cluster = _cluster(cluster_entry, kinds, cluster_part)
    model, code = _model(_Part(document, "model"), kinds)
    training = _training(_Part(document, "training").parse(TrainingEntry))
    _refuse_no_work(model, cluster, document)
    return Scenario(name, cluster, model, training, code)


def _refuse_no_work(model: ModelProfile, cluster: Cluster, document: Document) -> None:
    """A model that takes no time on a device has no throughput."""
    for device in cluster.devices:
        tables = [layer.times[device.kind] for layer in model.layers if device.kind in layer.times]
        if tables and not any(table.at(1).total_s for table in tables):
            raise InputError(
                f"model '{model.name}' takes no time on device kind '{device.kind}'",
                where=document.where(("model",)),
                valid="give some layer a time above zero",
            )


def scenario_schema() -> dict[str, Any]:
    """Return the JSON Schema of scenario files, for editors."""
    return TypeAdapter(ScenarioEntry).json_schema()


class _Part:
    """One part of a scenario: a key of its document, or all of the file that the key names."""

    def __init__(self, document: Document, key: str) -> None:
        value = document.value[key]
        if isinstance(value, str):
            try:
                self.document = Document(document.path.parent / value)
            except InputError as error:
                raise InputError(
                    f"{error.problem}: '{value}'", where=document.where((key,)), valid=error.valid
                ) from None
            self.value, self.location = self.document.value, ()
        else:
            self.document, self.value, self.location = document, value, (key,)

    location: Location

    def parse(self, kind: type[Entry]) -> Entry:
        return parse(kind, self.document, self.value, self.location)

    def where(self, *inner: int | str) -> str:
        return self.document.where((*self.location, *inner))

    def path(self, name: str) -> Path:
        """A path written in this part, which is relative to its file."""
        return self.document.path.parent / name


def _device_kinds(entry: ClusterEntry, part: _Part) -> dict[str, DeviceKind]:
    """The kinds that the devices name, from the scenario or from the datasheet."""
    own = {
        name: DeviceKind(name, {"fp32": kind.peak}, kind.memory, kind.memory_bandwidth, "the scenario")
        for name, kind in entry.kinds.items()
    }
    kinds = {}
    for index, device in enumerate(entry.devices):
        if device.kind in own:
            kinds[device.kind] = own[device.kind]
            continue
        try:
            kinds[device.kind] = find_kind(device.kind)
        except InputError:
            where = part.where("devices", index, "kind")
            raise unknown_name("device kind", device.kind, [*own, *DATASHEET], where=where) from None
    return kinds


def _cluster(entry: ClusterEntry, kinds: dict[str, DeviceKind], part: _Part) -> Cluster:
    devices = tuple(_device(device, kinds[device.kind]) for device in entry.devices)
    links = [_links(link, part, index) for index, link in enumerate(entry.links)]
    # One entry can stand for two links.
    entry_of_link = [index for index, made in enumerate(links) for _ in made]
    try:
        return Cluster(devices, tuple(chain.from_iterable(links)))
    except ClusterError as error:
        place = error.location
        if place[0] == "links":
            place = ("links", entry_of_link[int(place[1])], *place[2:])
        raise InputError(error.problem, part.where(*place), error.valid) from None


def _device(entry: DeviceEntry, kind: DeviceKind) -> Device:
    memory_bytes = kind.memory_bytes if entry.memory is None else entry.memory
    return Device(entry.name, entry.kind, entry.region, memory_bytes, entry.price_usd_per_hour)


def _links(entry: LinkEntry, part: _Part, index: int) -> list[Link]:
    where = part.where("links", index)
    one_way = (entry.source, entry.target) if entry.source and entry.target else None
    inside = (entry.inside, entry.inside) if entry.inside else None
    ends = [pair for pair in (entry.between, one_way, inside) if pair is not None]
    if len(ends) != 1 or (entry.source is None) != (entry.target is None):
        raise InputError(
            "the link does not say what it joins",
            where=where,
            valid="give one of 'between: [a, b]', 'from: a' with 'to: b', and 'inside: a'",
        )
    if entry.between is not None and entry.between[0] == entry.between[1]:
        inside_it = f"write 'inside: {entry.between[0]}'"
        raise InputError(f"the link joins '{entry.between[0]}' with itself", where=where, valid=inside_it)
    trace = None
    if entry.trace is not None:
        trace = read_trace_entry(entry.trace, part.document, (*part.location, "links", index, "trace"))
    if entry.bandwidth is not None and trace is not None:
        raise InputError(
            "the link gives both 'bandwidth' and 'trace'",
            where=where,
            valid="the trace says the bandwidth; to rescale it, give it a 'mean'",
        )
    if entry.bandwidth is None and trace is None:
        raise InputError("the link has no bandwidth", where=where, valid="add 'bandwidth: 100 Mbit/s' or a 'trace'")
    bandwidth_bps = trace.mean_bps if trace is not None else entry.bandwidth
    assert bandwidth_bps is not None
    pairs = [ends[0], ends[0][::-1]] if entry.between is not None else [ends[0]]
    return [Link(a, b, bandwidth_bps, entry.latency, trace, entry.price_usd_per_gb) for a, b in pairs]


def _model(part: _Part, kinds: dict[str, DeviceKind]) -> tuple[ModelProfile, ModelCode | None]:
    entry = part.parse(ModelEntry)
    if (entry.layers is None) == (entry.sailor is None):
        raise InputError("the model needs its costs", where=part.where(), valid="give one of 'layers' and 'sailor'")
    if entry.sailor is not None:
        sailor = entry.sailor
        profile = read_sailor(part.path(sailor.times), part.path(sailor.sizes), sailor.model)
        model = ModelProfile(entry.name, profile.layers)
    else:
        assert entry.layers is not None
        if not entry.layers:
            raise InputError("the model has no layers", where=part.where("layers"), valid="give at least one")
        layers = (_layer(layer, kinds, part, index) for index, layer in enumerate(entry.layers))
        model = ModelProfile(entry.name, tuple(chain.from_iterable(layers)))
    return model, _code(entry, part)


def _code(entry: ModelEntry, part: _Part) -> ModelCode | None:
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


def _layer(entry: LayerEntry, kinds: dict[str, DeviceKind], part: _Part, index: int) -> list[LayerProfile]:
    where = part.where("layers", index)
    if (entry.forward is None) == (entry.times is None):
        raise InputError("the layer needs its compute", where=where, valid="give one of 'forward' and 'times'")
    sizes = (entry.parameters, entry.output, entry.activation)
    try:
        if entry.forward is not None:
            layer = roofline_layer(LayerWork(entry.name, entry.forward, *sizes), kinds.values(), "fp32")
        else:
            assert entry.times is not None
            tables = {
                kind: TimeTable(times.samples, times.forward, times.backward_input, times.backward_weight)
                for kind, times in entry.times.items()
            }
            layer = LayerProfile(entry.name, *sizes, tables)
    except InputError as error:
        raise error.within(where) from None
    if entry.repeat == 1:
        return [layer]
    names = (f"{entry.name}-{number}" for number in range(entry.repeat))
    return [LayerProfile(name, *sizes, layer.times) for name in names]


def _training(entry: TrainingEntry) -> Training:
    optimizer = Optimizer(**asdict(entry.optimizer))
    return Training(entry.global_batch, entry.microbatch, optimizer, entry.precision, entry.seed)
