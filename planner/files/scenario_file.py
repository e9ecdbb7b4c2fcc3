"""Reads scenarios as people write them in YAML and resolves them to plain data in SI units."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from planner.files.cluster_part import read_cluster
from planner.files.documents import Document
from planner.files.effects_part import read_effects
from planner.files.faults import read_faults
from planner.files.model_part import read_model
from planner.files.parsing import parse
from planner.files.parts import Part
from planner.files.quantities import Name
from planner.files.scenario_entries import ScenarioEntry, StoredSamples, TrainingEntry
from planner.scenario.cluster import Cluster
from planner.scenario.effects import Effects
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Optimizer, Scenario, Training
from planner.scenario.training import LearningRateSchedule
from traces.common.errors import InputError
from traces.common.names import find_by_name, unknown_name

# The keys that a scenario cannot do without.
_NEEDED = ("name", "cluster", "model", "training")


def read_scenario(path: Path) -> Scenario:
    """Return the scenario in a YAML file, and in the files that it names.

    Raises:
        InputError: The first thing that is wrong, with file, line, key, value and what would be valid.
    """
    return scenario_in(Document(path))


def scenario_in(document: Document) -> Scenario:
    """Return the scenario in a document, and in those that it names.

    Raises:
        InputError: The first thing that is wrong, with file, line, key, value and what would be valid.
    """
    value, path = document.value, document.path
    if not isinstance(value, dict):
        raise InputError("this is not a scenario", where=str(path), valid="write keys: name, cluster, model, training")
    keys = [field.name for field in fields(ScenarioEntry)]
    for key in value:
        if key not in keys:
            raise unknown_name("key", str(key), keys, where=document.where((key,)))
    for key in _NEEDED:
        if key not in value:
            raise InputError(f"the key '{key}' is missing", where=str(path), valid=f"add '{key}:'")
    name = parse(Name, document, value["name"], ("name",))
    cluster, kinds = read_cluster(Part(document, "cluster"))
    model, code = read_model(Part(document, "model"), kinds)
    training = _training(Part(document, "training"))
    _refuse_no_work(model, cluster, document)
    effects = read_effects(Part(document, "effects"), cluster) if "effects" in value else Effects()
    faults = read_faults(Part(document, "faults"), cluster) if "faults" in value else ()
    data = _data(Part(document, "data"), cluster) if "data" in value else {}
    return Scenario(name, cluster, model, training, code, effects, faults, data)


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


def _training(part: Part) -> Training:
    entry = part.parse(TrainingEntry)
    try:
        schedule = LearningRateSchedule(**asdict(entry.optimizer.schedule))
    except InputError as error:
        raise InputError(error.problem, part.where("optimizer", "schedule", error.where), error.valid) from None
    optimizer = Optimizer(**{**asdict(entry.optimizer), "schedule": schedule})
    return Training(**{**asdict(entry), "optimizer": optimizer})


def _data(part: Part, cluster: Cluster) -> dict[str, int]:
    """Samples by region."""
    data = part.parse(dict[str, StoredSamples])
    for region in data:
        find_by_name(region, dict.fromkeys(cluster.regions), "region", where=part.where(region))
    return data
