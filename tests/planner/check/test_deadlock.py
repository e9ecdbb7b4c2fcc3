"""Orders that wait for themselves are found, and only they."""

import random

from hypothesis import given
from hypothesis import strategies as st

from planner.check.orders import find_cycle
from planner.plan.actions import Action, Kind, parse_action
from planner.plan.plan import Pipeline, Replica, Stage

SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
WHOLE = (Kind.FORWARD, Kind.BACKWARD)


def pipeline(workers: list[int], orders: list[str], microbatches: int) -> Pipeline:
    stages = tuple(Stage(n, n + 1, (Replica(f"device-{worker}"),), 1) for n, worker in enumerate(workers))
    rows = tuple(tuple(parse_action(text) for text in order.split()) for order in orders)
    return Pipeline(stages, (1,) * microbatches, rows)


def circle(made: Pipeline) -> list[str]:
    return [wait.describe(made) for wait in find_cycle(made)]


def test_a_circle_of_two_workers() -> None:
    made = pipeline([0, 1], ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], 2)
    assert circle(made) == [
        "device 'device-0' has 0B0 next, which needs 1B0 of device 'device-1'",
        "device 'device-1' has 1F1 next, which needs 0F1 of device 'device-0'",
    ]


def test_a_worker_that_waits_for_itself_while_others_wait_for_it() -> None:
    made = pipeline([0, 1], ["0F0 0B0", "1B0 1F0"], 1)
    assert circle(made) == ["device 'device-1' has 1B0 before 1F0, which it needs"]
    made = pipeline([0], ["0F0 0W0 0I0"], 1)
    assert circle(made) == ["device 'device-0' has 0W0 before 0I0, which it needs"]


def test_who_only_waits_for_the_circle_is_not_part_of_it() -> None:
    # Worker 0 waits for worker 1, which waits for worker 2, and that for worker 1.
    made = pipeline([0, 1, 2], ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"], 2)
    assert [wait.worker for wait in find_cycle(made)] == [1, 2]


def test_stages_of_one_worker_wait_for_each_other() -> None:
    good = pipeline([0, 1, 1, 0], ["0F0 3F0 3B0 0B0", "1F0 2F0 2I0 1I0 2W0 1W0"], 1)
    assert not find_cycle(good)
    bad = pipeline([0, 1, 1, 0], ["3F0 0F0 3B0 0B0", "1F0 2F0 2I0 1I0 2W0 1W0"], 1)
    assert [str(wait.action) for wait in find_cycle(bad)] == ["3F0", "1F0"]


@st.composite
def carried_out(draw: st.DrawFn) -> Pipeline:
    """Orders as they come about when actions are done one after the other, each when it may be."""
    workers = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    microbatches = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 10**6))
    renumbered = {worker: number for number, worker in enumerate(dict.fromkeys(workers))}
    holders = [renumbered[worker] for worker in workers]
    split = [[draw(st.booleans()) for _ in range(microbatches)] for _ in holders]
    kinds = {(s, m): SPLIT if split[s][m] else WHOLE for s in range(len(holders)) for m in range(microbatches)}
    left = [Action(s, kind, m) for (s, m), each in kinds.items() for kind in each]
    done: set[Action] = set()
    orders: list[list[str]] = [[] for _ in renumbered]
    chance = random.Random(seed)
    while left:
        action = chance.choice([a for a in left if needs(a, kinds) <= done])
        left.remove(action)
        done.add(action)
        orders[holders[action.stage]].append(str(action))
    return pipeline(holders, [" ".join(order) for order in orders], microbatches)


def needs(action: Action, kinds: dict[tuple[int, int], tuple[Kind, ...]]) -> set[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return {Action(stage - 1, Kind.FORWARD, microbatch)} if stage else set()
    if action.kind is Kind.BACKWARD_WEIGHT:
        return {Action(stage, Kind.BACKWARD_INPUT, microbatch)}
    after = kinds.get((stage + 1, microbatch))
    return {Action(stage, Kind.FORWARD, microbatch)} | ({Action(stage + 1, after[1], microbatch)} if after else set())


@given(carried_out())
def test_what_can_be_carried_out_has_no_circle(made: Pipeline) -> None:
    assert find_cycle(made) == ()


@given(carried_out(), st.randoms(use_true_random=False))
def test_a_circle_is_one(made: Pipeline, chance: random.Random) -> None:
    shuffled = Pipeline(
        made.stages, made.microbatches, tuple(tuple(chance.sample(order, len(order))) for order in made.orders)
    )
    waits = find_cycle(shuffled)
    for wait, after in zip(waits, (*waits[1:], *waits[:1]), strict=True):
        assert wait.holder == after.worker
        order = shuffled.orders[wait.holder]
        # What is needed is at or behind the action that its holder is about to do.
        assert order.index(wait.needs) >= order.index(after.action)
