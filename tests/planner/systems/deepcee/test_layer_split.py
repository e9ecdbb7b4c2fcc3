from itertools import combinations, pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.systems.deepcee.layer_split import Depth, SplitProblem, split_layers


@st.composite
def problems(draw: st.DrawFn) -> SplitProblem:
    """Layers with times of their own on each stage, and random room."""
    stages = draw(st.integers(1, 4))
    layers = draw(st.integers(stages, 6))
    seed = draw(st.integers(0, 10**6))
    random = np.random.default_rng(seed)
    until = np.cumsum(np.concatenate((np.zeros((stages, 1)), random.integers(1, 9, (stages, layers))), axis=1), axis=1)
    spans = until[:, None, :] - until[:, :, None]
    length = np.arange(layers + 1)[None, :] - np.arange(layers + 1)[:, None]
    possible = np.triu(np.ones((layers + 1, layers + 1), bool), 1)
    compute_s = np.where(possible, spans, np.inf)
    most = draw(st.integers(0, 12))
    room = np.where(possible, np.maximum(0, random.integers(0, most + 1, (stages, 1, 1)) + 4 - length), 0)
    return SplitProblem(
        compute_s,
        np.where(possible, length * random.integers(0, 5, (stages, 1, 1)), 0).astype(float),
        room.astype(np.int64),
        random.integers(0, 12, (stages - 1, layers + 1)).astype(float),
        random.integers(0, 9, stages - 1).astype(float),
        draw(st.integers(1, 9)),
    )


def second_terms_s(problem: SplitProblem) -> list[float]:
    repeats, stages, layers = problem.microbatches - 1, len(problem.compute_s), problem.compute_s.shape[1] - 1
    terms = [repeats * float(each) for each in problem.transfer_s.ravel()]
    for stage in range(stages):
        for first, end in combinations(range(layers + 1), 2):
            terms.append(
                repeats * float(problem.compute_s[stage, first, end]) + float(problem.sync_s[stage, first, end])
            )
    return sorted(set(terms))


def step_s(problem: SplitProblem, bounds: tuple[int, ...], bound_s: float, depth: Depth) -> float:
    """The objective of one cut with a bound on its second term, infinite where it cannot be."""
    repeats, stages = problem.microbatches - 1, len(problem.compute_s)
    trip_s = 0.0
    for stage, (first, end) in reversed(list(enumerate(pairwise(bounds)))):
        if stage < stages - 1:
            if repeats * problem.transfer_s[stage, end] > bound_s:
                return np.inf
            trip_s += 2 * (problem.transfer_s[stage, end] + problem.latency_s[stage])
        trip_s += problem.compute_s[stage, first, end]
        if repeats * problem.compute_s[stage, first, end] + problem.sync_s[stage, first, end] > bound_s:
            return np.inf
        kept = 1
        if depth != "one" and repeats:
            kept = stages - stage
            if depth == "hiding" and bound_s > 0:
                kept = max(kept, ceil(trip_s / (bound_s / repeats) - 1e-9))
            kept = min(kept, problem.microbatches)
        if kept > problem.room[stage, first, end]:
            return np.inf
    return float(trip_s + bound_s)


@settings(max_examples=120)
@given(problems(), st.sampled_from(["hiding", "plain", "one"]))
def test_no_cut_is_better(problem: SplitProblem, depth: Depth) -> None:
    stages, layers = len(problem.compute_s), problem.compute_s.shape[1] - 1
    cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    terms = second_terms_s(problem)
    best_s = min((step_s(problem, cut, bound, depth) for cut in cuts for bound in terms), default=np.inf)
    split = split_layers(problem, depth)
    if split is None:
        assert best_s == np.inf
        return
    assert min(step_s(problem, split, bound, depth) for bound in terms) == pytest.approx(best_s)


def test_a_faster_device_gets_more_layers() -> None:
    until = np.array([np.arange(9) * 1.0, np.arange(9) * 3.0])
    possible = np.triu(np.ones((9, 9), bool), 1)
    compute_s = np.where(possible, until[:, None, :] - until[:, :, None], np.inf)
    room = np.where(possible, 100, 0)
    problem = SplitProblem(compute_s, np.zeros((2, 9, 9)), np.array([room] * 2), np.zeros((1, 9)), np.zeros(1), 50)
    split = split_layers(problem)
    assert split is not None
    assert split == (0, 6, 8)
