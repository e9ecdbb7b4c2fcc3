"""What a model's loss and a stage's output must be: refused before the start, or before they travel."""

from pathlib import Path

import pytest
import torch

from executor.core.step_program import Transfer
from executor.training.models.loading import check_model
from executor.transport.wire_format import CompressedWire
from planner.cost.network import wire_bytes
from planner.plan.actions import Kind
from planner.scenario.scenario import ModelCode
from planner.scenario.training import COMPRESSIONS
from tests.helpers.processes.training import training_scenario
from tests.helpers.scenarios.builders import mesh_scenario
from traces.common.errors import InputError

MODEL = """
import torch
class Model:
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
    def loss(self, outputs, targets):
        return {loss}
    def samples(self, first, count):
        return torch.ones(count, 4), torch.ones(count, 2)
def build():
    return Model()
"""


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ("(outputs - targets).square().mean(1)", None),
        ("(outputs - targets).square()", r"'loss' returns shape \[1, 2\] for one sample; a tensor with one number"),
        ("0.5", "'loss' returns a float for one sample"),
        ("outputs - targets[:, :, None, None, None] @ outputs.mT", "'loss' fails for one sample: RuntimeError"),
    ],
)
def test_a_loss_is_one_number(loss: str, problem: str | None, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(loss=loss))
    scenario = training_scenario(ModelCode(path, {}), 1)
    if problem is None:
        check_model(scenario)
        return
    with pytest.raises(InputError, match=problem) as refused:
        check_model(scenario)
    # What the model raised is shown with its line.
    assert refused.value.where.partition(":")[0] == str(path)


def test_layers_that_take_no_single_sample_while_they_train_are_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    layers = "layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)]"
    text = MODEL.replace("layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]", layers)
    path.write_text(text.format(loss="(outputs - targets).square().mean()"))
    check_model(training_scenario(ModelCode(path, {}), 1))


def wire_and_transfer(compression: str, samples: int, values: int) -> tuple[CompressedWire, Transfer]:
    """Between two regions."""
    cluster = mesh_scenario(2, [1.0], [1.0], regions=["north", "south"]).cluster
    size_bytes = wire_bytes(compression, samples, 4 * values, 4)
    transfer = Transfer("device-0", "device-1", Kind.FORWARD, 0, 1, 7, 2, 2 + samples, size_bytes)
    return CompressedWire(compression, cluster, torch.float32), transfer


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("found", [1, 7, 24])
def test_another_size_is_refused_before_it_is_compressed(compression: str, found: int) -> None:
    wire, transfer = wire_and_transfer(compression, 3, 4)
    with pytest.raises(
        InputError, match=f"stage 0 sends {4 * found} bytes for samples 2 to 4 .* plan expects 48; a layer"
    ):
        wire.pack(transfer, torch.zeros(found).view(torch.uint8))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("samples", "values"), [(1, 1), (1, 5), (3, 1), (3, 4), (2, 0)])
def test_the_right_size_travels(compression: str, samples: int, values: int) -> None:
    wire, transfer = wire_and_transfer(compression, samples, values)
    payload = torch.ones(samples * values).view(torch.uint8)
    assert wire.payload_bytes(transfer) == payload.numel()
    if values:
        packed = wire.pack(transfer, payload)
        assert packed.numel() == transfer.size_bytes
        assert wire.unpack(transfer, packed).numel() == payload.numel()
