"""What rarer exchanges cost in accuracy: a classifier of handwritten digits, trained for real in two processes.

Between the two stands the scenario's WAN of 100 Mbit/s, held up inside the processes (`--emulator shaper`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file
from torch import nn

from executor.backend import TorchBackend
from executor.training.models.loading import load_model
from experiments.benches.result import Row
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Synchronisation
from planner.systems.registry import make_plan

# Forty-five times through the data. Before, the accuracy of any training jumps by points from step to step.
STEPS = 1000

# Steps take milliseconds here and exchanges ten times as long: without a bound each side would learn all it does before
# it hears of the other. Assumed: as many steps as there are between exchanges.
BOUND = 4

METHODS: Mapping[str, int] = {"asgd": 1, "asgd-ga": 4, "ma": 4}


def accuracy_rows(tell: Callable[[str], None]) -> list[Row]:
    """Return the held-out accuracy of each method after the same number of samples."""
    scenario = choose_scenario("digits")
    plan = make_plan("greedy", scenario)
    rows: list[Row] = []
    for method, every in METHODS.items():
        tell(f"training {scenario.model.name} with {method}")
        chosen = replace(plan, synchronisation=Synchronisation(method, interval_steps=every, staleness_bound=BOUND))
        with TemporaryDirectory(prefix="ropebridge-") as folder:
            target = Path(folder) / "parameters.safetensors"
            record = TorchBackend("real", emulator="shaper", parameters=target).run(scenario, chosen, None, STEPS)
            assert scenario.code is not None, "the scenario names its model's code"
            model = load_model(scenario.code, scenario.training.seed)
            layers = nn.Sequential(*model.layers)
            layers.load_state_dict(load_file(target))
        accuracy = float(model.accuracy(list(layers)))  # type: ignore[union-attr]
        rows.append({"method": method, "every": every, "accuracy": accuracy, "last_loss": record.losses[-1]})
    return rows
