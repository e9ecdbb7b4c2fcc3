"""Rows of gradients and parameters, their norm, and a step that is begun again."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from executor.core.clock import RunClock
from executor.core.step_program import StepProgram, compile_plan
from executor.training.flat_state import FlatParameters
from executor.training.models.loading import load_with_sizes
from executor.training.optimizer import squared_norm
from executor.training.real_compute import RealCompute
from tests.helpers.processes.training import GPT, placed_plan, train_in_one_process, training_scenario


def layers() -> list[nn.Module]:
    """Some parameters have a gradient, some none, some are frozen."""
    first, second = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    first.weight.requires_grad_(False)
    first.bias.grad = torch.arange(3.0)
    second[0].weight.grad = torch.ones(1, 3)
    return [first, nn.ReLU(), second]


FROZEN = slice(0, 6)
ELEMENTS = 6 + 3 + 3 + 1 + 2


def test_a_row_has_a_place_for_every_parameter() -> None:
    held = layers()
    rows = FlatParameters(held)
    assert rows.elements == ELEMENTS
    assert rows.gradients().tolist() == [0.0] * 6 + [0.0, 1.0, 2.0] + [1.0] * 3 + [0.0] * 3
    assert torch.equal(rows.parameters(), nn.utils.parameters_to_vector(nn.Sequential(*held).parameters()))


@given(st.lists(st.floats(-9, 9, width=32), min_size=ELEMENTS, max_size=ELEMENTS))
def test_what_is_put_can_be_had_back_but_for_frozen_parameters(numbers: list[float]) -> None:
    rows, row = FlatParameters(layers()), torch.tensor(numbers)
    weights = rows.parameters()
    rows.put_gradients(row)
    rows.put_parameters(row)
    kept = row.clone()
    row.zero_()
    for found, frozen in ((rows.gradients(), torch.zeros(6)), (rows.parameters(), weights[FROZEN])):
        assert torch.equal(found[FROZEN], frozen)
        assert torch.equal(found[6:], kept[6:])


@pytest.mark.parametrize("change", [FlatParameters.put_gradients, FlatParameters.add_gradients])
def test_rows_are_copies(change: Callable[[FlatParameters, torch.Tensor], None]) -> None:
    rows = FlatParameters(layers())
    before, parameters = rows.gradients(), rows.parameters()
    change(rows, torch.ones(ELEMENTS))
    rows.put_parameters(torch.zeros(ELEMENTS))
    expected = before + 1 if change is FlatParameters.add_gradients else torch.ones(ELEMENTS)
    expected[FROZEN] = 0
    assert torch.equal(rows.gradients(), expected)
    assert parameters.any()
    assert not rows.parameters()[6:].any()


def test_a_sum_of_no_gradients_is_none_and_one_of_zeros_is_zero() -> None:
    held, others = layers(), layers()
    # On one side only, and zero; its sign is no sign.
    others[2][1].weight.grad = torch.tensor([[-0.0]])
    total = FlatParameters(held).gradients() + FlatParameters(others).gradients()
    for own in (held, others):
        FlatParameters(own).put_gradients(total)
        assert own[0].bias.grad.tolist() == [0.0, 2.0, 4.0]
        assert own[2][1].weight.grad.tolist() == [[0.0]]
        assert [each.grad for each in (own[0].weight, own[2][0].bias, own[2][1].bias)] == [None] * 3
    fresh = layers()
    FlatParameters(fresh).add_gradients(total)
    assert fresh[2][1].weight.grad.tolist() == [[0.0]]
    assert fresh[2][1].bias.grad is None


def test_the_norm_is_that_of_float64_however_layers_are_grouped() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [10_000, 3, 400, 50_000, 7]
    gradients = [torch.randn(size, generator=generator) * 10.0 ** (index - 2) for index, size in enumerate(sizes)]
    exact = math.fsum(float(each) ** 2 for gradient in gradients for each in gradient)
    whole = squared_norm(gradients)
    assert whole == pytest.approx(exact, rel=1e-13)
    for cut in range(len(gradients) + 1):
        assert squared_norm(gradients[:cut]) + squared_norm(gradients[cut:]) == pytest.approx(whole, rel=1e-15)


def test_layers_without_parameters_have_an_empty_row() -> None:
    rows = FlatParameters([nn.ReLU()])
    rows.put_gradients(rows.gradients())
    assert rows.parameters().shape == (0,)


def test_a_step_that_broke_off_can_be_begun_again() -> None:
    scenario = training_scenario(GPT, 1)
    plan = placed_plan(scenario, "zb-v", [(3, 0), (3, 0)], [[1.0]], (5, 4, 3))
    (program,) = compile_plan(plan, scenario).values()
    assert scenario.code is not None
    loaded = load_with_sizes(scenario.code, scenario.training.seed, scenario.training.precision)
    rank = RealCompute(loaded, plan, program, scenario.training, RunClock(0.0))
    rows = rank.flat_parameters(0, 6, sum(size.parameter_bytes for size in loaded.sizes) // 4)
    expected = train_in_one_process(scenario, 3)
    for step in range(3):
        for done in (step + 2, len(program.work)):
            rank.start_step(StepProgram(step, plan, program, step * plan.global_batch))
            assert not rows.gradients().any()
            for work in program.work[:done]:
                assert rank.run(work, [], ready_s=0.0, complete=lambda sync: None).outputs == []
        assert rank.squared_norm() == pytest.approx(float(rows.gradients().double().square().sum()), rel=1e-5)
        assert rank.finish_step(step, None) == pytest.approx(expected.losses[step], rel=1e-6)
    for name, value in rank.named_parameters().items():
        torch.testing.assert_close(value, expected.parameters[name], rtol=1e-6, atol=1e-6)
