"""The fidelity bench's cases, without running them."""

from pathlib import Path

import pytest

from experiments.benches.simulation.fidelity_cases import BROADBAND, VARIABLE, Case, fidelity_cases
from planner.check import check_plan


def be_quiet(_: str) -> None:
    pass


def test_every_case_has_a_name_of_its_own_and_a_plan_that_fits() -> None:
    cases = fidelity_cases(be_quiet)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        check_plan(case.plan, case.scenario)


def test_what_a_case_is_called_is_what_its_links_do() -> None:
    def worst(case: Case) -> tuple[float, float]:
        links = case.scenario.cluster.links
        return max(link.jitter_s for link in links), max(link.loss for link in links)

    found = {case.name: worst(case) for case in fidelity_cases(be_quiet)}
    assert found.pop("three-jitter") == (0.004, 0.0)
    assert found.pop("two-loss") == (0.0, 0.001)
    assert set(found.values()) == {(0.0, 0.0)}


@pytest.mark.parametrize("named", [None, "elsewhere"])
def test_recorded_cases_without_their_traces_are_said_to_be_skipped(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if named is not None:
        monkeypatch.setenv(VARIABLE, str(tmp_path / named))
    told: list[str] = []
    assert not [case for case in fidelity_cases(told.append) if case.name.startswith("recorded-")]
    (line,) = told
    assert BROADBAND in line
    assert VARIABLE in line


def test_recorded_cases_play_the_traces_that_the_environment_names(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(shared_folder / "traces"))
    told: list[str] = []
    assert len([case for case in fidelity_cases(told.append) if case.name.startswith("recorded-")]) == 6
    assert not told
