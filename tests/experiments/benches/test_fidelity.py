"""The fidelity bench's cases and figures, without its runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.benches.cases import TRACES_VARIABLE
from experiments.benches.fidelity.case import Case, tcp_effects
from experiments.benches.fidelity.compare import Outcome, compare, gain_differences, rank_correlations
from experiments.benches.fidelity.fidelity import fidelity_cases
from experiments.benches.fidelity.hand_made import BROADBAND, hand_made_cases
from experiments.benches.fidelity.kept import KeptRuns, Measured
from planner.check import check_plan
from planner.runs.metrics import Metrics
from planner.scenario.effects import TCP
from traces.common.errors import InputError


def be_quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """The cases whose plans are written by hand: planning the others takes half a minute."""
    return hand_made_cases(be_quiet)


@pytest.mark.slow
def test_every_case_has_a_name_of_its_own_and_a_plan_that_fits() -> None:
    cases = fidelity_cases(be_quiet)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        check_plan(case.plan, case.simulated_scenario)
        assert case.ranks >= 2
    seen = {(case.scenario.name, replace(case.plan, strategy=""), case.policy, case.tcp, case.steps) for case in cases}
    assert len(seen) == len(cases)


def test_cases_are_called_what_their_links_do(cases: list[Case]) -> None:
    def worst(case: Case) -> tuple[float, float]:
        links = case.scenario.cluster.links
        return max(link.jitter_s for link in links), max(link.loss for link in links)

    found = {case.name: worst(case) for case in cases}
    assert found.pop("three-jitter-1f1b") == (0.004, 0.0)
    assert found.pop("two-loss-1f1b") == (0.0, 0.001)
    assert set(found.values()) == {(0.0, 0.0)}
    assert {case.name for case in cases if case.tcp == "as-is"} == {
        case.name for case in cases if case.name.endswith("-as-is")
    }


def test_links_are_shared_where_two_pairs_of_devices_use_them(cases: list[Case]) -> None:
    by_name = {case.name: case for case in cases}
    assert by_name["shared-1f1b"].has_shared_links
    assert not by_name["four-unlike-1f1b"].has_shared_links
    assert by_name["three-lte-1f1b"].has_traces
    assert not by_name["three-jitter-1f1b"].has_traces
    assert by_name["two-replicas-and-one-1f1b"].has_unequal_replicas


@pytest.mark.parametrize("named", [None, "elsewhere"])
def test_recorded_cases_without_their_traces_are_said_to_be_skipped(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACES_VARIABLE, raising=False)
    if named is not None:
        monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path / named))
    told: list[str] = []
    assert not [case for case in hand_made_cases(told.append) if "recorded" in case.name]
    (line,) = told
    assert BROADBAND in line
    assert TRACES_VARIABLE in line


def test_recorded_cases_play_the_traces_that_the_environment_names(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACES_VARIABLE, str(shared_folder / "traces"))
    told: list[str] = []
    recorded = [case for case in hand_made_cases(told.append) if "recorded" in case.name]
    assert len(recorded) == 7
    assert all(case.has_traces for case in recorded)
    assert not told


def outcome(case: Case, simulated: float, real: Sequence[float], decisions: int = 0) -> Outcome:
    def metrics(samples_per_s: float) -> Metrics:
        return replace(METRICS, samples_per_s=samples_per_s)

    made = ("in flight [2, 1] -> [3, 1]",) * decisions
    return Outcome(case, Measured(metrics(simulated), made), [Measured(metrics(each), made) for each in real])


METRICS = Metrics(
    steps=1, step_s=1.0, samples_per_s=1.0, bubble_ratio=0.0, utilisation={}, wan_bytes=0, cost_usd=0.0, staleness=0.0
)


def test_order_counts_within_a_scenario_and_only_beyond_the_spread(cases: list[Case]) -> None:
    four = [case for case in cases if case.scenario.name == "four-unlike" and case.tcp == "wide-area"]
    assert len(four) == 4
    real = [[10.0, 10.2], [11.0, 11.3], [11.2, 11.4], [13.0, 13.1]]

    def outcomes(*simulated: float) -> list[Outcome]:
        return [outcome(*each) for each in zip(four, simulated, real, strict=True)]

    right, wrong = outcomes(10, 12, 11, 13), outcomes(10, 11, 14, 13)
    assert rank_correlations(right) == {"four-unlike": 1.0}
    # One pair is tied; one of the other five has the wrong order.
    assert rank_correlations(wrong) == {"four-unlike": pytest.approx(3 / 5)}
    assert rank_correlations(right[:3]) == {}


def test_gain_is_relative_to_the_same_plan_without_a_policy(cases: list[Case]) -> None:
    other, plain = cases[:2]
    adapted = replace(plain, name="adapted", policy="depth")
    found = gain_differences(
        [outcome(other, 1, [1]), outcome(plain, 10, [8, 12]), outcome(adapted, 12, [10, 12], decisions=2)]
    )
    assert found == {adapted.name: pytest.approx(1.2 - 1.1)}
    assert gain_differences([outcome(plain, 10, [10]), outcome(adapted, 12, [12])]) == {}


def test_errors_are_those_of_the_mean_of_the_real_runs(cases: list[Case]) -> None:
    assert outcome(cases[0], 11.0, [9.0, 11.0]).throughput_error == pytest.approx(0.1)


def test_each_run_of_the_demo_counts(cases: list[Case]) -> None:
    seen = outcome(cases[0], 11.0, [9.0, 11.0, 12.0], decisions=2)
    (one, _) = seen.simulated.changes
    other = "in flight [4, 1] -> [2, 1]; layer 3 from a to b, 1.0 MB"
    changed = zip(seen.real, [(one, one), (one,) * 4, (one, other)], strict=True)
    seen = replace(seen, real=[replace(each, changes=changes) for each, changes in changed])
    assert seen.worst_of_a_run == pytest.approx(11 / 9 - 1)
    assert seen.decisions_apart == 2
    assert seen.unlike_decisions == 1


def test_kept_runs_count_beside_an_equal_simulation_only(cases: list[Case], tmp_path: Path) -> None:
    seen = outcome(cases[0], 11.0, [9.0, 11.0], decisions=2)
    KeptRuns(tmp_path / "kept").keep("two", seen.simulated, [*seen.real])
    kept = KeptRuns(tmp_path / "kept")
    assert kept.real_runs("two", seen.simulated) == seen.real
    assert kept.real_runs("two", replace(seen.simulated, changes=())) == []
    assert kept.real_runs("three", seen.simulated) == []
    (tmp_path / "kept" / "two.json").write_text('{"simulated": {}}')
    with pytest.raises(InputError, match=r"two.json: no results of a case are in this file"):
        kept.real_runs("two", seen.simulated)
    KeptRuns(None).keep("two", seen.simulated, [])
    assert KeptRuns(None).real_runs("two", seen.simulated) == []
    with pytest.raises(InputError, match="no folder can be made here"):
        KeptRuns(tmp_path / "kept" / "two.json")


@pytest.mark.parametrize(
    ("settings", "idle_s", "window_bytes"),
    [
        ({"tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "1"}, TCP.idle_s, TCP.window_bytes),
        ({"tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "0"}, math.inf, TCP.window_bytes),
        ({"tcp_congestion_control": "bbr", "tcp_slow_start_after_idle": "1"}, math.inf, TCP.window_bytes),
        ({"tcp_wmem": "4096 16384 8388608"}, TCP.idle_s, 2 * TCP.window_bytes),
    ],
)
def test_effects_follow_from_the_settings_of_a_host(
    settings: dict[str, str], idle_s: float, window_bytes: float
) -> None:
    effects = tcp_effects(settings)
    assert (effects.idle_s, effects.window_bytes) == (idle_s, window_bytes)


def test_a_case_runs_in_both_backends_and_kept_runs_are_not_repeated(cases: list[Case], tmp_path: Path) -> None:
    (case,) = (replace(case, steps=2) for case in cases if case.name == "two-replicas-and-one-1f1b")
    first = compare(case, 1, "shaper", be_quiet, KeptRuns(tmp_path))
    assert (first.simulated.metrics.steps, first.real[0].metrics.steps) == (2, 2)
    # Times of a new run would differ.
    assert compare(case, 1, "shaper", be_quiet, KeptRuns(tmp_path)).real == first.real
