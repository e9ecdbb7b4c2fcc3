import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benches.cases import draw_seeds
from experiments.benches.kept import KeptResults
from experiments.benches.planning.adaptation import checks, measure_case
from experiments.benches.planning.adaptation_cases import AdaptationCase, cases, scenarios, wide_area_links, with_traces
from experiments.benches.planning.adaptation_traces import DEVELOP, DURATION_S, HELD_OUT, TracePair, trace_pairs
from experiments.benches.planning.hindsight import WINDOW_S, best_mean, possible_gains
from experiments.benches.planning.regret import Course, choose_courses, measure_course
from experiments.benches.planning.regret import checks as regret_checks
from experiments.benches.processes import marked_processes
from experiments.runs.scenario import choose_scenario
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import in_window, within_regions
from planner.systems.registry import make_plan
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.process_watch import left_behind, started, wait_until
from traces.common.errors import InputError
from traces.generators.presets import PRESETS
from traces.trace import LinkTrace

NOMINAL_BPS = (400e6, 400e6)


def test_every_preset_plays_scaled_where_its_own_scale_does_not_fit() -> None:
    pairs = list(trace_pairs(DEVELOP, None, NOMINAL_BPS))
    assert [pair.name for pair in pairs] == [f"preset {name}" for name in PRESETS]
    for pair in pairs:
        means_bps = [trace.mean_bps for trace in pair.traces]
        assert pair.traces[0] != pair.traces[1]
        if pair.scaled:
            assert means_bps == pytest.approx(NOMINAL_BPS)
        else:
            assert 1 / 4 <= sum(means_bps) / sum(NOMINAL_BPS) <= 4


def test_recorded_sets_are_played_in_halves_without_a_trace_in_common(shared_folder: Path) -> None:
    halves = [list(trace_pairs(half, shared_folder / "traces", NOMINAL_BPS)) for half in (DEVELOP, HELD_OUT)]
    for pairs in halves:
        assert {pair.name.split()[0] for pair in pairs} == {"preset", "wanify", "fcc", "netlatency"}
        latencies = [pair.traces[0].latency_s for pair in pairs if pair.name.startswith("netlatency")]
        assert all(series is not None and np.all(series >= 0) for series in latencies)
    used = [{trace for pair in pairs for trace in pair.traces} for pairs in halves]
    assert used[0].isdisjoint(used[1])


def test_no_device_of_the_large_case_holds_its_model() -> None:
    own, alike, large = scenarios()
    assert len({device.kind for device in own.cluster.devices}) > 1
    assert len({(device.kind, device.memory_bytes) for device in alike.cluster.devices}) == 1
    for device in large.cluster.devices:
        alone = replace(large, cluster=Cluster((device,), ()))
        with pytest.raises(InputError, match="no split fits into memory"):
            make_plan("auto", alone)


def test_each_scenario_has_every_pair_of_traces_of_a_half() -> None:
    found = list(cases([DEVELOP], None))
    assert [case.scenario.name for case in found] == [each.name for each in scenarios() for _ in PRESETS]
    assert all(case.scenario.training.compressions == ("none", "int8") for case in found)


def test_traces_go_on_both_directions_of_the_links_between_regions() -> None:
    scenario = choose_scenario("cloud-edge-end")
    assert [link.name for link in wide_area_links(scenario)] == ["cloud->edge", "edge->end"]
    traces = [LinkTrace([0.0], [rate_bps], 60.0) for rate_bps in (1e8, 2e8)]
    played = {link.name: link.trace for link in with_traces(scenario, traces).cluster.links}
    assert (played["cloud->edge"], played["edge->cloud"]) == (traces[0], traces[0])
    assert (played["edge->end"], played["end->edge"]) == (traces[1], traces[1])
    assert played["end->end"] is None


@pytest.mark.slow
def test_a_row_holds_what_was_run() -> None:
    steady = LinkTrace([0.0], [4e8], 60.0)
    scenario = with_traces(scenarios()[0], (steady, steady))
    row = measure_case(AdaptationCase(DEVELOP, TracePair("steady", (steady, steady), scaled=False), scenario), 60.0)
    assert (row["scenario"], row["trace"], row["scaled"]) == ("cloud-edge-end", "steady", "no")
    # Links that never change leave nothing to gain, and nobody loses.
    assert float(row["auto_gain"]) == pytest.approx(1.0, abs=0.02)
    assert float(row["possible_gain"]) == pytest.approx(1.0, abs=0.02)
    assert float(row["payable_gain"]) == pytest.approx(1.0, abs=0.02)
    assert float(row["none_per_s"]) >= float(row["users_per_s"])
    assert [check.holds for check in checks(DEVELOP, [row])] == [True, False, False]


@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_no_sequence_of_plans_trains_more_than_the_best_one(plans: int, windows: int, data: st.DataObject) -> None:
    rates = st.lists(st.floats(0, 10), min_size=windows, max_size=windows)
    per_s = np.array([data.draw(rates) for _ in range(plans)])
    times_s = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.75, 2.0, math.inf]), min_size=windows, max_size=windows)
    moves_s = WINDOW_S * np.array([[data.draw(times_s) for _ in range(plans)] for _ in range(plans)])

    def most(window: int, plan: int) -> float:
        """Most that a run trains from a window on, with every sequence tried."""
        if window == windows:
            return 0.0
        found = [float(per_s[plan, window]) + most(window + 1, plan)]
        for new in set(range(plans)) - {plan}:
            lasts = float(moves_s[plan, new, window]) / WINDOW_S
            if window + lasts < windows:
                passed, part = divmod(lasts, 1.0)
                last = window + int(passed)
                found.append((1 - part) * float(per_s[new, last]) + most(last + 1, new))
        return max(found)

    assert best_mean(per_s, moves_s) == pytest.approx(most(0, 0) / windows)


def test_moves_take_a_part_of_what_is_possible() -> None:
    # Three devices pay while links are quick, one while they are slow; a move takes seconds.
    trace = LinkTrace([0.0, 60.0], [4e8, 1e5], 120.0)
    scenario = with_traces(scenarios()[1], (trace, trace))
    alone, together = (
        make_plan("auto", each) for each in (within_regions(scenario, {"cloud"}), in_window(scenario, 0.0, 60.0))
    )
    gains = possible_gains(scenario, [together, alone], 120.0)
    assert len(together.devices) > 1
    assert 1.05 < gains.paid < gains.free - 0.01
    # Without moves both are the same.
    only = possible_gains(scenario, [together, replace(together, strategy="another")], 120.0)
    assert only.paid == pytest.approx(only.free)


def test_shares_are_of_the_cases_that_have_something_to_gain() -> None:
    rows = [
        {"auto_gain": 1.1, "possible_gain": 1.2, "users_gain": 1.5},
        {"auto_gain": 1.21, "possible_gain": 1.6, "users_gain": 1.5},
        {"auto_gain": 0.97, "possible_gain": 1.1, "users_gain": 1.5},
    ]
    least, users, count, mean, share = checks(HELD_OUT, rows)
    assert (count.value, count.holds) == (2, False)
    assert (least.value, least.holds) == (0.97, False)
    assert users.value == pytest.approx(1.5)
    assert mean.value == pytest.approx((1.1 * 1.21) ** 0.5)
    assert share.value == pytest.approx((0.1 / 0.2 + 0.21 / 0.6) / 2)


@given(st.integers(0, 2**32))
def test_a_course_repeats_its_pieces_and_changes_one_at_a_time(seed: int) -> None:
    random = Random(seed)
    course = Course.draw(random)
    trace = course.trace(8e6)
    assert trace.duration_s == sum(length_s for length_s, _ in course.pieces)
    assert trace.mean_bps * trace.duration_s == pytest.approx(
        sum(8e6 * length * rate for length, rate in course.pieces)
    )
    other = course.changed(random)
    pairs = zip(course.pieces, other.pieces, strict=True)
    assert sum(one != another for one, another in pairs) == 1


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_each_round_adds_new_courses_that_differ_from_the_worse_half_in_one_piece(seed: int, number: int) -> None:
    random = Random(seed)
    drawn = choose_courses(random, number, {})
    assert drawn == choose_courses(Random(seed), number, {})
    gains = {course: 1.0 - place / 100 for place, course in enumerate(drawn)}
    added = choose_courses(random, number, gains)
    assert len({*drawn, *added}) == 2 * number
    worse = drawn[-max(1, number // 2) :]
    for course in added:
        assert any(
            len(course.pieces) == len(parent.pieces)
            and sum(one != another for one, another in zip(course.pieces, parent.pieces, strict=True)) == 1
            for parent in worse
        )


def test_a_course_on_which_the_policy_loses_misses_the_bar() -> None:
    rows = [{"round": 0, "auto_gain": 1.2}, {"round": 0, "auto_gain": 0.99}, {"round": 1, "auto_gain": 0.9}]
    least, mean = regret_checks(rows)
    assert (least.value, least.holds, mean.holds) == (0.9, False, True)
    assert mean.value == pytest.approx((1.2 * 0.99) ** 0.5)


def test_courses_that_are_kept_are_not_measured_again(tmp_path: Path) -> None:
    (course,) = choose_courses(Random(draw_seeds("courses", 1, 7, lambda _: None)[0]), 1, {})
    KeptResults(tmp_path).write(f"{course.text()}, {DURATION_S:g} s", [{"course": "kept", "auto_gain": 0.97}])
    done = ropebridge("bench", "regret", "--quick", "--count", 1, "--seed", 7, "--keep", tmp_path, "--json")
    assert json.loads(done.stdout)["rows"] == [{"round": 0, "course": "kept", "auto_gain": 0.97}]
    assert done.returncode == 1


@pytest.mark.slow
def test_a_course_is_measured_from_both_starts() -> None:
    # A constant link: nothing is gained or lost.
    rows = measure_course(Course(((5.0, 1.0), (20.0, 1.0))), 30.0)
    assert [row["start"] for row in rows] == ["declared", "one region"]
    first, second = (float(row["none_per_s"]) for row in rows)
    assert first > second > 0
    assert float(rows[0]["auto_gain"]) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["adaptation", "regret"])
def test_a_signal_ends_the_bench_with_its_processes_in_the_middle_of_a_case(bench: str, tmp_path: Path) -> None:
    """A case takes minutes."""
    with started(["bench", bench, "--count", "3", "--seed", "1"], tmp_path) as (process, mark):
        wait_until(lambda: any("forkserver" in each for each in marked_processes(mark).values()), "no pool")
        assert process.poll() is None
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert left_behind(tmp_path) == []
