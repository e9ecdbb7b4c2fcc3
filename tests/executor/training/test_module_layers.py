"""Modules that were not written as a list of layers: the list does what they do, or they are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.training.models.sequential import layers_of
from traces.common.errors import InputError


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return functional.relu(image + self.norm(self.convolution(image)))


class Residual(nn.Module):
    """As torchvision's: blocks in lists, a function between modules, modules without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Sequential(Block(8), Block(8)), Block(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.pool(self.body(self.relu(self.stem(image))))
        return self.head(self.drop(torch.flatten(hidden, 1)))


class Skips(nn.Module):
    """What the first layer puts out is needed to the end; the input is needed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        first = self.one(row) + row
        return self.four(first + self.three(self.two(first)))


class Undecided(nn.Module):
    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return row if row.sum() > 0 else -row


class Two(nn.Module):
    def forward(self, row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return row + other


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)

    def forward(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.inside(row)
        return hidden, hidden


def run(layers: list[nn.Module], inputs: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def test_a_network_of_blocks() -> None:
    module, images = Residual(), torch.randn(2, 3, 8, 8)
    layers = layers_of(module, images)
    assert [type(layer).__name__ for layer in layers] == ["Conv2d", "Block", "Block", "Block", "Linear"]
    assert module.training
    assert all(layer.training for layer in layers)
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert sum(counts) == sum(parameter.numel() for parameter in module.parameters())
    found = run([layer.eval() for layer in layers], images)
    torch.testing.assert_close(found, module.eval()(images))
    # The parameters are the module's own: gradients arrive there.
    found.sum().backward()
    assert module.stem.weight.grad is not None


def test_what_is_needed_later_stays_in_one_layer() -> None:
    module, rows = Skips(), torch.randn(3, 4)
    layers = layers_of(module, rows)
    # The input is needed beside what the first puts out, and that beside what the second and the third do.
    assert [sum(1 for _ in layer.parameters()) for layer in layers] == [2, 4, 2]
    torch.testing.assert_close(run(layers, rows), module(rows))


def test_a_list_of_modules_and_one_without_memory() -> None:
    chain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    assert [len(list(layer.parameters())) for layer in layers_of(chain, torch.randn(2, 4))] == [2, 2]
    with torch.device("meta"):
        module = Residual()
    assert len(layers_of(module, torch.empty(2, 3, 8, 8, device="meta"))) == 5


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Undecided(), "'forward' of Undecided cannot be traced: TraceError"),
        (Two(), "'forward' of Two takes more than one tensor"),
        (Pair(), "the outputs of Pair and of its layers one after the other differ in shape"),
    ],
)
def test_what_is_no_chain_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(InputError) as caught:
        layers_of(module, torch.randn(3, 4))
    assert message in str(caught.value)
    assert "write 'layers' by hand" in str(caught.value)


def test_a_frozen_submodule_stays_frozen() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[1].eval()
    layers = layers_of(module, torch.zeros(2, 3))
    assert [each.training for each in module] == [True, False, True]
    modes = {id(each): each.training for layer in layers for each in layer.modules()}
    assert not modes[id(module[1])]
