"""A resolved scenario as JSON: all files read, all quantities in SI units, all defaults written out.

What is infinite (a device that never returns, a network interface that never binds) is ``null``: JSON has no word for
it. A scenario that was written before a key existed reads with the key's default.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import ComputeEffects, Effects, MemoryEffects, NetworkEffects, Slowdown, Straggler
from planner.scenario.faults import Absence, Fault, Hang, LinkOutage
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.size_curve import SizeCurve
from planner.scenario.training import LearningRateSchedule, Optimizer, Training
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError
from traces.trace import LinkTrace

_FAULTS: Mapping[str, type[Fault]] = {"absence": Absence, "hang": Hang, "link outage": LinkOutage}
_FAULT_NAMES = {kind: name for name, kind in _FAULTS.items()}


def write_resolved_scenario(scenario: Scenario, path: Path) -> None:
    """Write a scenario to a file that `read_resolved_scenario` reads."""
    data = asdict(scenario)
    data["faults"] = [{"fault": _FAULT_NAMES[type(fault)], **asdict(fault)} for fault in scenario.faults]
    write_text_atomically(path, json.dumps(_plain(data), allow_nan=False) + "\n")


def read_resolved_scenario(path: Path) -> Scenario:
    """Return the scenario in a file that ropebridge wrote.

    Raises:
        InputError: There is no such file, or ropebridge did not write it.
    """
    try:
        return _scenario(json.loads(path.read_text()))
    except FileNotFoundError:
        raise InputError("there is no such file", where=str(path), valid="name the folder of a run") from None
    except InputError as error:
        raise error.within(str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"this is not a resolved scenario: {error}",
            where=str(path),
            valid="give one that ropebridge wrote",
        ) from None


def _plain(value: object) -> object:
    """The value as JSON can say it."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    return None if value == math.inf else value


def _infinite_where_null(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: math.inf if value is None and key in keys else value for key, value in data.items()}


def _scenario(data: dict[str, Any]) -> Scenario:
    devices = tuple(Device(**_infinite_where_null(device, "interface_bps")) for device in data["cluster"]["devices"])
    links = tuple(_link(link) for link in data["cluster"]["links"])
    training = data["training"]
    code = data["code"]
    return Scenario(
        data["name"],
        Cluster(devices, links),
        _model(data["model"]),
        Training(**{**training, "optimizer": _optimizer(training["optimizer"])}),
        ModelCode(Path(code["path"]), code["arguments"]) if code else None,
        _effects(data["effects"]) if "effects" in data else Effects(),
        tuple(_fault(fault) for fault in data.get("faults", ())),
        data.get("data", {}),
    )


def _optimizer(data: dict[str, Any]) -> Optimizer:
    return Optimizer(**{**data, "schedule": LearningRateSchedule(**data.get("schedule", {}))})


def _link(data: dict[str, Any]) -> Link:
    trace, curve = data["trace"], data.get("size_curve")
    made = {"trace": LinkTrace(**trace) if trace else None, "size_curve": SizeCurve(**curve) if curve else None}
    return Link(**{**data, **made})


def _model(data: dict[str, Any]) -> ModelProfile:
    sharded = {int(degree): _model(model) for degree, model in data.get("sharded", {}).items()}
    return ModelProfile(data["name"], tuple(_layer(layer) for layer in data["layers"]), sharded)


def _layer(data: dict[str, Any]) -> LayerProfile:
    tables = {
        kind: TimeTable(**{name: tuple(column) for name, column in table.items()})
        for kind, table in data["times"].items()
    }
    return LayerProfile(**{**data, "times": tables})


def _effects(data: dict[str, Any]) -> Effects:
    compute = data["compute"]
    made = {
        "stragglers": tuple(Straggler(**straggler) for straggler in compute["stragglers"]),
        "slowdowns": tuple(
            Slowdown(slowdown["device"], tuple(slowdown["times_s"]), tuple(slowdown["speed"]))
            for slowdown in compute["slowdowns"]
        ),
    }
    network = NetworkEffects(**_infinite_where_null(data["network"], "window_bytes", "idle_s"))
    return Effects(network, ComputeEffects(**{**compute, **made}), MemoryEffects(**data.get("memory", {})))


def _fault(data: dict[str, Any]) -> Fault:
    values = _infinite_where_null(data, "end_s")
    return _FAULTS[values.pop("fault")](**values)
