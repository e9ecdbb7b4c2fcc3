"""Orders as torch.distributed.pipelining sees them: its own checks, and its own orders of the same schedules."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.benches.planning.pipeline_families import Times, problem_of
from planner.plan.actions import to_torch_csv
from planner.schedules import SCHEDULES
from planner.schedules.kernel.problem import SchedulingProblem

pytestmark = pytest.mark.filterwarnings("default")  # what torch warns of while it loads is not ours

STRAIGHT, LOOPED, V_SHAPED = [0, 1, 2], [0, 1, 0, 1], [0, 1, 2, 2, 1, 0]


@pytest.fixture
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def pipeline(workers: Sequence[int], microbatches: int) -> SchedulingProblem:
    problem = problem_of([Times(latency_s=1)] * len(workers), [1] * microbatches, np.inf)
    return replace(problem, workers=tuple(workers), capacity_bytes=np.full(max(workers) + 1, np.inf))


def text_of(name: str, problem: SchedulingProblem) -> str:
    orders = SCHEDULES[name](problem)
    return to_torch_csv([orders.actions(worker) for worker in range(problem.worker_count)])


@pytest.mark.parametrize("depths", [(3, 2, 1), (5, 3, 1), (4, 4, 4), (1, 1, 1), (1, 2, 3)])
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, STRAIGHT) for name in ("1f1b", "compact-zb", "gpipe", "portfolio", "zb-h1", "zb-h2")),
        *((name, LOOPED) for name in ("compact-zb", "gpipe", "interleaved-1f1b", "portfolio")),
        *((name, V_SHAPED) for name in ("compact-zb", "gpipe", "portfolio", "zb-v")),
    ],
)
def test_torch_reads_the_csv_and_can_schedule_it(
    torch_schedules: Any, name: str, workers: list[int], depths: tuple[int, ...]
) -> None:
    problem = pipeline(workers, 6)
    problem = replace(problem, in_flight=(*depths, *depths)[: problem.stages])
    text = text_of(name, problem)
    # The three things that torch's private runtime does with a file: parse it, check it, add sends and receives
    # (which raises where the order would deadlock).
    parsed = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }
    ranks = torch_schedules._validate_schedule(parsed, problem.worker_count, problem.stages, 6)
    assert ranks == dict(enumerate(workers))
    with_transfers = torch_schedules._add_send_recv(parsed, lambda stage: ranks[stage], problem.stages)
    for rank, actions in with_transfers.items():
        computed = [str(action) for action in actions if "SEND" not in str(action) and "RECV" not in str(action)]
        assert computed == text.splitlines()[rank].split(",")


@pytest.mark.parametrize(("ranks", "rounds", "microbatches"), [(2, 2, 4), (2, 3, 8), (3, 2, 9), (4, 2, 8), (4, 4, 16)])
def test_interleaved_1f1b_is_torchs(torch_schedules: Any, ranks: int, rounds: int, microbatches: int) -> None:
    schedule = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=rounds,
        _n_microbatches=microbatches,
        number_of_rounds=microbatches // ranks,
        microbatches_per_round=ranks,
    )
    rows = text_of("interleaved-1f1b", pipeline(list(range(ranks)) * rounds, microbatches)).splitlines()
    for rank, row in enumerate(rows):
        theirs = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)
        # Torch calls a whole backward B in files as well as here.
        assert row.split(",") == [str(action) for action in theirs if action is not None]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 4), (3, 6), (4, 8), (4, 3), (8, 20)])
def test_zb_v_is_torchs(torch_schedules: Any, ranks: int, microbatches: int) -> None:
    schedule = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=microbatches)
    rows = text_of("zb-v", pipeline([*range(ranks), *reversed(range(ranks))], microbatches)).splitlines()
    for rank, row in enumerate(rows):
        theirs = torch_schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(schedule, rank)
        assert row.split(",") == [str(action) for action in theirs if action is not None]


@pytest.mark.parametrize("microbatches", [1, 3, 5, 7])
def test_interleaved_1f1b_takes_what_the_workers_do_not_divide(microbatches: int) -> None:
    whole = text_of("interleaved-1f1b", pipeline(LOOPED, microbatches + microbatches % 2)).splitlines()
    last = f"{microbatches}"
    kept = [",".join(cell for cell in row.split(",") if cell[2:] != last) for row in whole]
    assert text_of("interleaved-1f1b", pipeline(LOOPED, microbatches)).splitlines() == kept
