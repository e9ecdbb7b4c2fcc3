"""The bench of profiles, on a model so small that its figures mean nothing."""

from pathlib import Path

import pytest

from experiments.benches.simulation.predicted import TrainedCase
from experiments.benches.simulation.profile import CASES, RANKS, _case
from planner.scenario.scenario import ModelCode

GPT = Path(__file__).parents[3] / "experiments" / "models" / "gpt.py"
SMALL = TrainedCase(
    "small",
    ModelCode(GPT, {"vocabulary": 32, "width": 32, "heads": 2, "blocks": 2, "length": 16}),
    samples=2,
    microbatches=3,
    steps=4,
    kind="cpu",
)


def test_every_example_with_data_of_its_own_is_a_case() -> None:
    models = {path.stem for path in GPT.parent.glob("*.py")} - {"__init__", "llama", "characters"}
    assert {case.code.path.stem for case in CASES} == models
    assert RANKS == 2


@pytest.mark.timed
@pytest.mark.slow
def test_a_profile_becomes_a_prediction_beside_a_run() -> None:
    told: list[str] = []
    row = _case(SMALL, 1, told.append)
    assert row["predicted_step_s"] > 0  # type: ignore[operator]
    assert row["measured_step_s"] > 0  # type: ignore[operator]
    assert row["step_error"] == row["predicted_step_s"] / row["measured_step_s"] - 1  # type: ignore[operator]
    assert told[0] == "small, round 1 of 1"
