"""Trains a classifier of handwritten digits for real with each method of exchange, and compares the accuracies.

Two processes train, with the scenario's WAN of 100 Mbit/s emulated inside them (`--emulator shaper`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from safetensors.torch import load_file
from torch import nn

from executor.backend import TorchBackend
from executor.training.models.loading import load_model
from experiments.benches.result import BenchResult, Row, at_most
from experiments.reproductions.cloudless.measurements import digits_scenario
from planner.plan.plan import Synchronisation
from planner.scenario.scenario import ModelCode, Scenario
from planner.systems.registry import make_plan
from traces.common.atomic import scratch_folder

MOST_ACCURACY_LOST = 0.01

# 45 epochs; in earlier epochs the accuracy still varies by percentage points from step to step.
TRAINED_STEPS = 1000

# Bound on the staleness, steps. Here exchanges take ten times as long as steps; without a bound training would end
# before the first exchange arrives. Assumption: as many steps as there are between exchanges.
BOUND = 4

METHODS: Mapping[str, int] = {"asgd": 1, "asgd-ga": 4, "ma": 4}

# Where the data are; with data by class, one region has the images of digits 0 to 4, and the other one those of 5 to 9.
EVERYWHERE, BY_CLASS = "everywhere", "regional, by class"
DATA: Mapping[str, bool] = {EVERYWHERE: False, "regional, alike": False, BY_CLASS: True}


def execute_accuracy(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Train with each method for each place of the data, and compare the accuracies; ``quick`` takes one place."""
    places = [EVERYWHERE] if quick else list(DATA)
    rows = [row for place in places for row in _accuracy_rows(place, tell)]
    # Of data by class the publication says nothing.
    checks = [
        at_most(
            f"accuracy lost against ASGD, data {place}, share",
            _accuracy_lost([row for row in rows if row["data"] == place]),
            MOST_ACCURACY_LOST,
        )
        for place in places
        if place != BY_CLASS
    ]
    return BenchResult(rows, checks)


def _accuracy_lost(rows: Sequence[Row]) -> float:
    """Return by how much the worst method of one place of the data is less accurate than ASGD, the first row."""
    return max(float(rows[0]["accuracy"]) - float(row["accuracy"]) for row in rows)


def _accuracy_rows(place: str, tell: Callable[[str], None]) -> list[Row]:
    """Return the held-out accuracy of each method after the same number of samples."""
    rows: list[Row] = []
    for method, every in METHODS.items():
        scenario = _placed(place)
        plan = make_plan("greedy", scenario)
        tell(f"training {scenario.model.name} with {method}, data {place}")
        chosen = replace(plan, synchronisation=Synchronisation(method, interval_steps=every, staleness_bound=BOUND))
        with scratch_folder() as folder:
            target = folder / "parameters.safetensors"
            record = TorchBackend("real", emulator="shaper", parameters=target).run(
                scenario, chosen, None, TRAINED_STEPS
            )
            assert scenario.code is not None, "the scenario names its model's code"
            model = load_model(scenario.code, scenario.training.seed)
            layers = nn.Sequential(*model.layers)
            layers.load_state_dict(load_file(target))
        accuracy = float(model.accuracy(list(layers)))  # type: ignore[attr-defined]
        rows.append(
            {"data": place, "method": method, "every": every, "accuracy": accuracy, "last_loss": record.losses[-1]}
        )
    return rows


def _placed(place: str) -> Scenario:
    """Return the scenario with its data everywhere, or a half of them in each region."""
    scenario = digits_scenario()
    assert isinstance(scenario.code, ModelCode), "it is a file"
    code = replace(scenario.code, arguments={**scenario.code.arguments, "by_class": DATA[place]})
    data = {} if place == EVERYWHERE else dict.fromkeys(scenario.cluster.regions, 1)
    return replace(scenario, code=code, data=data)
