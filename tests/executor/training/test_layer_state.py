"""The state of a layer, packed here and unpacked there, makes both go on alike."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from executor.training.flat_state import LayerState, named_state, packed_state, sharded_dimensions
from executor.training.optimizer import UpdateRule
from executor.training.tensor_parallel import shard_layer
from planner.scenario.training import Optimizer, Training

RULES = ["sgd", "momentum", "adamw"]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    unused = nn.Linear(3, 3)
    unused.weight.requires_grad_(False)
    return [nn.Linear(4, 3), nn.BatchNorm1d(3), unused]


def train(modules: list[nn.Module], rule: UpdateRule, first: int, steps: int) -> None:
    """The last layer takes part in no step."""
    for step in range(first, first + steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        rule.clear_gradients()
        for module in modules[:2]:
            inputs = module(inputs)
        inputs.square().sum().backward()
        rule.update(0.05, None)


def rule_of(modules: list[nn.Module], name: str) -> UpdateRule:
    training = Training(8, optimizer=Optimizer(name, 0.05, weight_decay=0.01))
    return UpdateRule([each for module in modules for each in module.parameters()], training)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("trained", [0, 3])
def test_who_takes_over_goes_on_as_the_other_would_have(name: str, trained: int) -> None:
    here = layers()
    rule = rule_of(here, name)
    train(here, rule, 0, trained)
    state = LayerState(here, rule)
    row = state.pack()
    assert row.dtype == torch.uint8
    assert row.shape == (state.size_bytes,)

    there = copy.deepcopy(layers())
    for each in there:
        for parameter in each.parameters():
            nn.init.ones_(parameter)
    other = rule_of(there, name)
    assert LayerState(there, other).size_bytes == len(row)
    LayerState(there, other).unpack(row)
    train(here, rule, trained, 3)
    train(there, other, trained, 3)
    for one, two in zip(here, there, strict=True):
        for key, value in one.state_dict().items():
            assert torch.equal(two.state_dict()[key], value), key


@pytest.mark.parametrize("name", RULES)
def test_a_rule_over_more_parameters_goes_on_with_those_that_it_had(name: str) -> None:
    modules, expected = layers(), layers()
    rule, whole = rule_of(modules[:1], name), rule_of(expected[:1], name)
    for each, own in ((modules, rule), (expected, whole)):
        train(each[:1], own, 0, 2)
    wider = rule_of(modules, name)
    wider.adopt(rule)
    train(modules[:1], wider, 2, 2)
    train(expected[:1], whole, 2, 2)
    assert torch.equal(modules[0].weight, expected[0].weight)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("sgd", []), ("momentum", ["momentum_buffer"]), ("adamw", ["exp_avg", "exp_avg_sq", "step"])],
)
def test_a_packed_state_has_the_tensors_of_its_layer_by_name(name: str, kept: list[str]) -> None:
    here = layers()
    rule = rule_of(here, name)
    train(here, rule, 0, 3)
    for layer in here:
        found = named_state(layer, name, LayerState([layer], rule).pack())
        expected = dict(layer.named_buffers())
        for own, parameter in layer.named_parameters():
            names = [own, *(f"{own}:{each}" for each in kept)]
            expected |= dict(zip(names, [parameter.detach(), *rule.state(parameter)], strict=True))
        assert found.keys() == expected.keys()
        assert all(torch.equal(each, expected[own]) for own, each in found.items())


@dataclass
class Member:
    """Stands in for a device of a group, whose other devices do nothing."""

    degree: int
    place: int

    def shard(self, full: torch.Tensor, dimension: int) -> torch.Tensor:
        return full.chunk(self.degree, dimension)[self.place]

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs


def block() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    made.register_buffer("mask", torch.arange(5.0))
    return made


LAYOUT = {"0": "vocabulary", "2": "column", "4": "row"}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_parts_of_a_group_are_those_of_the_unsharded_state(name: str, before: int, after: int) -> None:
    """Parts are gathered by name, and packed for a group of another size, with all that the optimizer keeps."""

    def member(degree: int, place: int) -> tuple[nn.Module, UpdateRule, Member | None]:
        layer, group = block(), Member(degree, place) if degree > 1 else None
        if group is not None:
            shard_layer(layer, LAYOUT, group)
        return layer, rule_of([layer], name), group

    whole, rule, _ = member(1, 0)
    for step in range(3):
        rule.clear_gradients()
        whole(torch.arange(step, step + 6)).square().sum().backward()
        rule.update(0.05, None)
    state = named_state(whole, name, LayerState([whole], rule).pack())
    gathered: dict[str, list[torch.Tensor]] = {}
    for place in range(before):
        layer, own, group = member(before, place)
        LayerState([layer], own).unpack(packed_state(layer, name, state, group))
        parts = named_state(layer, name, LayerState([layer], own).pack())
        dimensions = sharded_dimensions(layer, name)
        assert set(dimensions) <= set(parts)
        for tensor, part in parts.items():
            if not place or tensor in dimensions:
                gathered.setdefault(tensor, []).append(part)
    merged = {
        tensor: torch.cat(parts, dimensions[tensor]) if tensor in dimensions else parts[0]
        for tensor, parts in gathered.items()
    }
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[tensor], value) for tensor, value in state.items())
    for place in range(after):
        layer, own, group = member(after, place)
        packed = packed_state(layer, name, merged, group)
        assert len(packed) == LayerState([layer], own).size_bytes
        LayerState([layer], own).unpack(packed)
        for tensor, part in named_state(layer, name, LayerState([layer], own).pack()).items():
            dimension = sharded_dimensions(layer, name).get(tensor)
            expected = state[tensor] if dimension is None else state[tensor].chunk(after, dimension)[place]
            assert torch.equal(part, expected), tensor
