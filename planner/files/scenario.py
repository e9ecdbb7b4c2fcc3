"""Reads scenarios from YAML files, and converts all quantities to SI units."""

from collections import Counter
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from planner.files.cluster import ClusterEntry, read_cluster
from planner.files.documents import Document
from planner.files.effects import EffectsEntry, read_effects
from planner.files.faults import FaultEntry, read_faults
from planner.files.model import ModelEntry, read_model
from planner.files.parsing import Name, Part, file_entry, parse
from planner.files.training import TrainingEntry, read_training
from planner.scenario.cluster import Cluster
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario, check_countable
from traces.common.errors import InputError, find_by_name, unknown_name

# Number of training samples in a region.
StoredSamples = Annotated[int, Field(ge=1, le=1_000_000_000_000)]


@file_entry
class ScenarioEntry:
    """A scenario; the value of each key but ``name`` may also be the path of a file with that value.

    ``effects`` are those of TCP if absent; ``none`` switches all effects off. ``data`` gives the number of samples that
    each region stores and trains on; if absent, all regions have all samples. What the samples are says ``training``.
    """

    name: Name
    cluster: ClusterEntry | str
    model: ModelEntry | str
    training: TrainingEntry | str
    effects: Literal["none"] | EffectsEntry | str = field(default_factory=EffectsEntry)
    faults: tuple[FaultEntry, ...] | str = ()
    data: dict[str, StoredSamples] | str = field(default_factory=dict)


_REQUIRED = ("name", "cluster", "model", "training")


def read_scenario(path: Path) -> Scenario:
    """Return the scenario in a YAML file, and in the files that it names.

    Raises:
        InputError: A file is not valid; the message gives file, line, key and value of the first mistake.
    """
    return scenario_in(Document(path))


def scenario_in(document: Document) -> Scenario:
    """Return the scenario in a document and in the files that it names; raises as `read_scenario` does."""
    value, path = document.value, document.path
    if not isinstance(value, dict):
        raise InputError("this is not a scenario", where=str(path), valid="write keys: name, cluster, model, training")
    keys = [field.name for field in fields(ScenarioEntry)]
    for key in value:
        if key not in keys:
            raise unknown_name("key", str(key), keys, where=document.where((key,)))
    for key in _REQUIRED:
        if key not in value:
            raise InputError(f"the key '{key}' is missing", where=str(path), valid=f"add '{key}:'")
    name = parse(Name, document, value["name"], ("name",))
    cluster, kinds = read_cluster(Part(document, "cluster"))
    training = read_training(Part(document, "training"))
    most_devices = max(Counter(device.machine for device in cluster.devices).values())
    model, code = read_model(Part(document, "model"), kinds, training.precision, most_devices)
    _refuse_no_work(model, cluster, document)
    effects = read_effects(document, cluster)
    faults = read_faults(Part(document, "faults"), cluster) if "faults" in value else ()
    data = _data(Part(document, "data"), cluster) if "data" in value else {}
    scenario = Scenario(name, cluster, model, training, code, effects, faults, data)
    try:
        check_countable(scenario)
    except InputError as error:
        raise error.within(str(path)) from None
    return scenario


def _refuse_no_work(model: ModelProfile, cluster: Cluster, document: Document) -> None:
    """Refuse a model that takes no time on a device, which would have infinite throughput."""
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


def _data(part: Part, cluster: Cluster) -> dict[str, int]:
    """Return the number of samples stored in each region."""
    data = part.parse(dict[str, StoredSamples])
    for region in data:
        find_by_name(region, dict.fromkeys(cluster.regions), "region", where=part.where(region))
    return data
