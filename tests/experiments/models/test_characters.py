"""The characters that the small GPT learns: the same wherever a step begins, and never those that are held out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.models.characters import HELD_OUT, build

LENGTH = 16
MODEL = build(width=8, heads=2, blocks=1, length=LENGTH)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_samples_are_windows_of_the_text_whatever_the_batch(first: int, count: int) -> None:
    inputs, targets = MODEL.samples(first, count)
    assert inputs.shape == targets.shape == (count, LENGTH)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for index in range(count):
        alone, _ = MODEL.samples(first + index, 1)
        assert torch.equal(alone[0], inputs[index])


def test_the_end_of_the_text_is_held_out() -> None:
    inputs, targets = MODEL.held_out()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1:, 0], targets[:-1, -1])
    assert 0.09 < HELD_OUT * 0.99 < inputs.numel() / 460_000 < HELD_OUT * 1.05
