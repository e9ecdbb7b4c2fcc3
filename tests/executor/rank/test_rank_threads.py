"""Ranks share the cores that they may run on."""

import os

import pytest

from executor.training.device import threads_of_a_rank


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 2, 1), (1, 4, 1)])
def test_a_mask_of_the_process_counts(cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert threads_of_a_rank(ranks) == threads
