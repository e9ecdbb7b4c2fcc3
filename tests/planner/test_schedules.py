import inspect
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.actions import Action, Kind, from_torch_csv, parse_action, to_torch_csv
from planner.plan import Pipeline, Replica, Stage
from planner.schedules import SCHEDULES
from traces.errors import InputError

NAMES = st.sampled_from(sorted(SCHEDULES))


def pipeline_of(depths: Sequence[int], microbatches: int) -> Pipeline:
    stages = (Stage(i, i + 1, (Replica(f"device-{i}"),), depth) for i, depth in enumerate(depths))
    return Pipeline(tuple(stages), (1,) * microbatches)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    depths = sorted(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)), reverse=True)
    return pipeline_of(depths, draw(st.integers(1, 12)))


def orders(name: str, pipeline: Pipeline) -> list[tuple[Action, ...]]:
    return [SCHEDULES[name](pipeline, stage) for stage in range(len(pipeline.stages))]


@settings(deadline=None)
@given(NAMES, pipelines())
def test_every_forward_and_backward_comes_once_and_in_order(name: str, pipeline: Pipeline) -> None:
    for stage, actions in enumerate(orders(name, pipeline)):
        microbatches = range(len(pipeline.microbatches))
        expected = {Action(stage, kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in microbatches}
        assert len(actions) == len(expected)
        assert set(actions) == expected
        for i in microbatches:
            assert actions.index(Action(stage, Kind.FORWARD, i)) < actions.index(Action(stage, Kind.BACKWARD, i))


@settings(deadline=None)
@given(pipelines())
def test_1f1b_holds_as_many_microbatches_as_its_depth_and_never_more(pipeline: Pipeline) -> None:
    for stage, actions in zip(pipeline.stages, orders("1f1b", pipeline), strict=True):
        assert most_live(actions) == min(stage.in_flight, len(pipeline.microbatches))


@settings(deadline=None)
@given(pipelines())
def test_gpipe_holds_all_microbatches(pipeline: Pipeline) -> None:
    assert {most_live(actions) for actions in orders("gpipe", pipeline)} == {len(pipeline.microbatches)}


def most_live(actions: Sequence[Action]) -> int:
    live = most = 0
    for action in actions:
        live += 1 if action.kind is Kind.FORWARD else -1
        most = max(most, live)
    return most


def test_the_pictures_in_the_docstrings() -> None:
    pipeline = pipeline_of([3, 2, 1], 4)
    for name, make in SCHEDULES.items():
        documentation = inspect.getmodule(make).__doc__
        drawn = [line.split()[2:] for line in documentation.splitlines() if line.strip().startswith("stage ")]
        made = [[f"{action.kind}{action.microbatch}" for action in actions] for actions in orders(name, pipeline)]
        assert [[cell for cell in row if cell != ".."] for row in drawn] == made


@settings(deadline=None)
@given(NAMES, pipelines())
def test_torchs_csv_and_back(name: str, pipeline: Pipeline) -> None:
    ranks = tuple(orders(name, pipeline))
    assert from_torch_csv(to_torch_csv(ranks)) == ranks


def test_the_csv_is_a_row_per_rank_and_idle_slots_are_skipped() -> None:
    assert to_torch_csv(orders("1f1b", pipeline_of([2, 1], 2))) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert from_torch_csv("0F0,,0I0,\n , 1W12\n") == (
        (Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD_INPUT, 0)),
        (Action(1, Kind.BACKWARD_WEIGHT, 12),),
    )


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2f0", "2F0 1", "0SEND_F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_action(text)
    assert str(caught.value) == f"'{text}' is not an action; write stage, F, B, I or W, microbatch: for example 2F0"


def test_a_wrong_cell_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"line 2: '1G0' is not an action"):
        from_torch_csv("0F0\n1F0,1G0\n")


@pytest.mark.parametrize("depths", [[3, 2, 1], [5, 3, 1], [4, 4, 4], [1, 1, 1]])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.filterwarnings("default")  # what torch warns of while it loads is not ours
def test_torch_reads_the_csv_and_can_schedule_it(name: str, depths: list[int]) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    text = to_torch_csv(orders(name, pipeline_of(depths, 6)))
    # The three things that torch's private runtime does with a file: parse it, check it, add sends and receives
    # (which raises where the order would deadlock).
    parsed = {
        rank: [schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }
    ranks = schedules._validate_schedule(parsed, len(depths), len(depths), 6)
    assert ranks == {0: 0, 1: 1, 2: 2}
    with_transfers = schedules._add_send_recv(parsed, lambda stage: ranks[stage], len(depths))
    for rank, actions in with_transfers.items():
        computed = [str(action) for action in actions if "SEND" not in str(action) and "RECV" not in str(action)]
        assert computed == text.splitlines()[rank].split(",")
