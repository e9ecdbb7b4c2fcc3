"""The state of a layer, packed here and unpacked there, makes both go on alike."""

import copy

import pytest
import torch
from torch import nn

from executor.training.flat_state import LayerState, named_state
from executor.training.optimizer import UpdateRule
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
