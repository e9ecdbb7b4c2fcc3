"""A resolved scenario as JSON: all files read, all quantities in SI units."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from planner.cluster import Cluster, Device, Link
from planner.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario import ModelCode, Optimizer, Scenario, Training
from traces.atomic import write_text_atomically
from traces.errors import InputError
from traces.trace import LinkTrace


def write_resolved_scenario(scenario: Scenario, path: Path) -> None:
    """Write a scenario to a file that `read_resolved_scenario` reads."""
    write_text_atomically(path, json.dumps(asdict(scenario), default=_plain) + "\n")


def read_resolved_scenario(path: Path) -> Scenario:
    """Return the scenario in a file that ropebridge wrote.

    Raises:
        InputError: There is no such file, or ropebridge did not write it.
    """
    try:
        return _scenario(json.loads(path.read_text()))
    except FileNotFoundError:
        raise InputError("there is no such file", where=str(path), valid="name the folder of a run") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"this is not a resolved scenario: {error}",
            where=str(path),
            valid="give one that ropebridge wrote",
        ) from None


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    assert isinstance(value, Path), value
    return str(value)


def _scenario(data: dict[str, Any]) -> Scenario:
    devices = tuple(Device(**device) for device in data["cluster"]["devices"])
    links = tuple(
        Link(**{**link, "trace": LinkTrace(**link["trace"]) if link["trace"] else None})
        for link in data["cluster"]["links"]
    )
    layers = tuple(_layer(layer) for layer in data["model"]["layers"])
    training = data["training"]
    code = data["code"]
    return Scenario(
        data["name"],
        Cluster(devices, links),
        ModelProfile(data["model"]["name"], layers),
        Training(**{**training, "optimizer": Optimizer(**training["optimizer"])}),
        ModelCode(Path(code["path"]), code["arguments"]) if code else None,
    )


def _layer(data: dict[str, Any]) -> LayerProfile:
    tables = {
        kind: TimeTable(**{name: tuple(column) for name, column in table.items()})
        for kind, table in data["times"].items()
    }
    return LayerProfile(**{**data, "times": tables})
