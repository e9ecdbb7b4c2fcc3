"""A loss or parameters that are not finite end a run, which names step, stage and last good checkpoint."""

import json
import math
import re
import socket
from pathlib import Path

import pytest

from executor.recovery.checkpoints import CheckpointFolder
from experiments.runs.folder import read_record
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.process_watch import PATIENCE_S, left_behind, started

# The samples of the step with index 6 are wrong. A mask is infinite, and may be.
MODEL = """
import torch
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.full((4,), float("-inf")))
    def forward(self, x):
        return x * self.scale
class Model:
    def __init__(self, wrong):
        self.wrong = wrong
        self.layers = [Scaled(), torch.nn.Linear(4, 4)]
    def loss(self, outputs, targets):
        loss = torch.nn.functional.mse_loss(outputs, targets)
        if targets.max() > 5:
            # Zero, whose gradient is no number.
            loss = loss + (outputs - outputs.detach()).abs().sum().sqrt()
        return loss
    def samples(self, first, count):
        inputs, targets = torch.ones(count, 4), torch.ones(count, 4)
        if first // 4 == 6:
            if self.wrong == "gradient":
                targets[:] = 10.0
            else:
                inputs[:] = float(self.wrong)
        return inputs, targets
def build(wrong):
    return Model(wrong)
"""

SCENARIO = """
name: scaled
cluster:
  devices:
    - {name: left, kind: t4, region: here}
    - {name: right, kind: t4, region: here}
  links:
    - {inside: here, bandwidth: 1 Gbit/s, latency: 0 ms}
model:
  name: scaled
  code: model.py
  arguments: {wrong: WRONG}
  layers:
    - {name: first, parameters: 4 B, output: 16 B, activation: 16 B, forward: 32 FLOP}
    - {name: second, parameters: 80 B, output: 16 B, activation: 16 B, forward: 32 FLOP}
training: {global_batch: 4, microbatch: 1}
"""


def run(folder: Path, wrong: str, *options: str) -> tuple[int, str, str]:
    (folder / "model.py").write_text(MODEL)
    (folder / "scaled.yaml").write_text(SCENARIO.replace("WRONG", f"'{wrong}'"))
    arguments = ["run", str(folder / "scaled.yaml"), "--strategy=megatron", "--on-this-device", *options]
    with started(arguments, folder) as (process, _):
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert left_behind(folder) == []
    return process.returncode, output, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "steps", "says"),
    [
        ("nan", 12, r"the loss of step 7 of 12 is nan, in stage 1 of pipeline 0; "),
        ("inf", 12, r"the loss of step 7 of 12 is (nan|inf), in stage 1 of pipeline 0; "),
        # The loss of the next step and the next checkpoint both show the parameters; either can be first.
        ("gradient", 12, r"(is not finite after step 7|the loss of step 8 of 12 is nan, in stage 1 of pipeline 0); "),
        # The last update gives parameters that no loss shows.
        ("gradient", 7, r"is not finite after step 7; "),
    ],
)
def test_the_run_ends_and_leaves_a_good_checkpoint(wrong: str, steps: int, says: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    options = [
        f"--steps={steps}",
        f"--checkpoint={checkpoints}",
        "--checkpoint-every=1",
        f"--output={tmp_path / 'run'}",
    ]
    status, output, errors = run(tmp_path, wrong, *options)
    assert (status, output) == (1, "")
    first, last = errors.splitlines()
    assert first.startswith("ropebridge: rank ")
    assert f"host {socket.gethostname()}): " in first
    assert re.search(says, first)
    assert "--allow-nan" in first
    # The checkpoints of the last steps before may not be on disk yet.
    good = CheckpointFolder(checkpoints).newest_step()
    assert good is not None
    assert 0 < good <= 6
    assert last == f"last good checkpoint in {checkpoints}: step {good}, from which '--resume' goes on"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_allowed_if_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "run"
    status, output, errors = run(tmp_path, "nan", "--steps=12", "--allow-nan", "--json", f"--output={target}")
    assert status == 0, errors
    assert [loss is None for loss in json.loads(output)["losses"]] == [False] * 6 + [True] * 6
    assert list(map(math.isfinite, read_record(target).losses)) == [True] * 6 + [False] * 6
    assert ropebridge("report", target).returncode == 0
