import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benches.planning.pipeline_families import Times, problem_of
from planner.plan.actions import Action, Kind, from_torch_csv, parse_action, to_torch_csv
from planner.schedules import SCHEDULES
from traces.common.errors import InputError

QUICK = ("gpipe", "1f1b", "zb-h1", "zb-h2")


def rows(name: str, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    orders = SCHEDULES[name](problem_of([Times()] * stages, [1] * microbatches, float("inf")))
    return tuple(orders.actions(worker) for worker in range(stages))


@given(st.sampled_from(QUICK), st.integers(1, 6), st.integers(1, 12))
def test_torchs_csv_and_back(name: str, stages: int, microbatches: int) -> None:
    ranks = rows(name, stages, microbatches)
    assert from_torch_csv(to_torch_csv(ranks)) == ranks


def test_the_csv_is_a_row_per_rank_and_idle_slots_are_skipped() -> None:
    assert to_torch_csv(rows("gpipe", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert from_torch_csv("0F0,,0I0,\n , 1W12\n") == (
        (Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD_INPUT, 0)),
        (Action(1, Kind.BACKWARD_WEIGHT, 12),),
    )


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2f0", "2F0 1", "0SEND_F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_action(text)
    valid = "write stage number, kind (F, B, I or W) and microbatch number: for example 2F0"
    assert str(caught.value) == f"'{text}' is not an action; {valid}"


def test_a_wrong_cell_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"line 2: '1G0' is not an action"):
        from_torch_csv("0F0\n1F0,1G0\n")
