"""Which points a sweep has: products, lists and draws, and what tells them apart."""

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.sweep.parameters import ParameterEntry, checked_parameter
from experiments.sweep.points import combinations, ground_of, points_of
from experiments.sweep.sweep_file import read_sweep
from traces.common.errors import InputError

BATCH, LATENCY, RATE = "training.global_batch", "cluster.links[0].latency", "cluster.links[0].trace.mean"


def sweep_of(folder: Path, parameters: dict, **settings: object):
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"scenario": "two-regions", **settings, "parameters": parameters}, sort_keys=False))
    return read_sweep(path)


def test_grids_make_a_product_whose_first_parameter_changes_slowest(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {BATCH: {"grid": [32, 64]}, "policy": {"grid": ["none", "depth", "deepcee"]}})
    assert [tuple(values.values()) for values in combinations(sweep)] == [
        (32, "none"),
        (32, "depth"),
        (32, "deepcee"),
        (64, "none"),
        (64, "depth"),
        (64, "deepcee"),
    ]


def test_lists_go_together_as_one_factor_and_draws_come_last(tmp_path: Path) -> None:
    parameters = {
        BATCH: {"list": [32, 64]},
        LATENCY: {"uniform": ["5 ms", "50 ms"]},
        "steps": {"grid": [5, 6]},
        "strategy": {"list": ["megatron", "gpipe"]},
    }
    points = list(combinations(sweep_of(tmp_path, parameters, draws=2)))
    assert [(point[BATCH], point["strategy"], point["steps"]) for point in points] == [
        (batch, strategy, steps)
        for batch, strategy in ((32, "megatron"), (64, "gpipe"))
        for steps in (5, 6)
        for _ in range(2)
    ]
    draws = [point[LATENCY] for point in points]
    # Every combination meets the same two draws.
    assert draws == draws[:2] * 4
    assert draws[0] != draws[1]
    # The names stand in the order of the file.
    assert all(list(point) == list(parameters) for point in points)


def test_more_values_and_draws_leave_the_points_as_they_were(tmp_path: Path) -> None:
    def keys(batches: list[int], draws: int) -> set[str]:
        parameters = {BATCH: {"grid": batches}, RATE: {"loguniform": ["10 Mbit/s", "1000 Mbit/s"]}}
        return {point.key for point in points_of(sweep_of(tmp_path, parameters, draws=draws))}

    few = keys([32, 64], 3)
    assert len(few) == 6
    assert few < keys([16, 64, 32], 3)
    assert few < keys([32, 64], 5)
    assert len(keys([16, 64, 32], 5)) == 15


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 10_000),
    st.floats(1e-3, 1e3),
    st.floats(1.001, 1e6),
    st.integers(-50, 50),
    st.integers(0, 50),
)
def test_draws_stay_within_their_bounds(
    seed: int, number: int, low: float, factor: float, first: int, width: int
) -> None:
    high = low * factor
    for kind in ("uniform", "loguniform"):
        drawn = checked_parameter("x", ParameterEntry(**{kind: (low, high)}), "").drawn(seed, number)
        assert low * (1 - 1e-11) <= drawn <= high * (1 + 1e-11)
    whole = checked_parameter("x", ParameterEntry(integers=(first, first + width)), "").drawn(seed, number)
    assert isinstance(whole, int)
    assert first <= whole <= first + width
    assert checked_parameter("x", ParameterEntry(choice=("a", None)), "").drawn(seed, number) in ("a", None)


def test_a_device_named_like_a_file_that_cannot_be_read_is_a_device(tmp_path: Path) -> None:
    """Texts that name a file count by what it holds; reading this one is an error of input and output."""
    sweep = sweep_of(tmp_path, {"cluster.devices[0].name": {"grid": ["/proc/self/mem", "gpu"]}})
    assert len({point.key for point in points_of(sweep)}) == 2


def test_draws_are_spread_as_their_names_say() -> None:
    def draws(**entry: object) -> list:
        parameter = checked_parameter("x", ParameterEntry(**entry), "")
        return [parameter.drawn(1, number) for number in range(4000)]

    # Four standard errors of the mean of so many draws.
    assert math.isclose(sum(draws(uniform=(2.0, 6.0))) / 4000, 4.0, abs_tol=4 * 4 / math.sqrt(12 * 4000))
    logarithms = [math.log10(drawn) for drawn in draws(loguniform=(1.0, 1e4))]
    assert math.isclose(sum(logarithms) / 4000, 2.0, abs_tol=4 * 4 / math.sqrt(12 * 4000))
    counts = [draws(integers=(1, 4)).count(value) for value in (1, 2, 3, 4)]
    assert all(abs(count - 1000) < 4 * math.sqrt(750) for count in counts)
    assert draws(uniform=("2 ms", "6 ms"))[0].endswith(" ms")


def test_what_files_hold_tells_points_and_sweeps_apart(tmp_path: Path) -> None:
    scenario, trace = tmp_path / "own.yaml", tmp_path / "link.csv"
    model = Path("experiments/scenarios/gpt-small.yaml").resolve()
    scenario.write_text(
        "name: own\ncluster:\n  devices:\n    - {name: a, kind: t4, region: west}\n"
        "    - {name: b, kind: t4, region: east}\n"
        "  links:\n    - {between: [west, east], latency: 1 ms, trace: {file: link.csv}}\n"
        f"model: {model}\ntraining: {{global_batch: 8}}\n"
    )
    (tmp_path / "other.csv").write_text("time_s,bandwidth_mbps\n0,10\n1,20\n")

    def seen() -> tuple[str, list[str]]:
        parameters = {"cluster.links[0].trace.file": {"grid": ["link.csv", "other.csv"]}}
        sweep = sweep_of(tmp_path, parameters, scenario="own.yaml")
        return ground_of(sweep), [point.key for point in points_of(sweep)]

    trace.write_text("time_s,bandwidth_mbps\n0,30\n1,40\n")
    ground, keys = seen()
    assert seen() == (ground, keys)
    trace.write_text("time_s,bandwidth_mbps\n0,30\n1,41\n")
    assert seen()[0] != ground
    assert [key == before for key, before in zip(seen()[1], keys, strict=True)] == [False, True]


WRONG = {
    "an empty grid": ({BATCH: {"grid": []}}, {}, ["sweep.yaml", BATCH, "grid is empty"]),
    "no values": ({BATCH: {}}, {}, [BATCH, "has no values", "grid, list, uniform"]),
    "two kinds": ({BATCH: {"grid": [1], "list": [2]}}, {}, ["gives grid and list"]),
    "a value twice": ({BATCH: {"grid": [1, 2, 1]}}, {}, ["1 is given twice"]),
    "unequal lists": ({BATCH: {"list": [1, 2]}, "steps": {"list": [1]}}, {}, ["steps", "1 values", "2", "same length"]),
    "no draws": ({BATCH: {"integers": [1, 4]}}, {}, [BATCH, "draws: 100"]),
    "draws of nothing": ({BATCH: {"grid": [1]}}, {"draws": 3}, ["sweep.yaml:2: draws", "no parameter is random"]),
    "bounds the wrong way": ({BATCH: {"integers": [4, 1]}}, {"draws": 1}, ["between 4 and 1"]),
    "units that differ": ({LATENCY: {"uniform": ["1 ms", "1 s"]}}, {"draws": 1}, ["'1 ms'", "'1 s'", "same unit"]),
    "no logarithm": ({LATENCY: {"loguniform": ["0 ms", "1 ms"]}}, {"draws": 1}, ["'0 ms'", "above zero"]),
    "no bound": ({LATENCY: {"uniform": ["fast", "slow"]}}, {"draws": 1}, ["'fast' is no bound"]),
    "an unknown kind": ({BATCH: {"gird": [1]}}, {}, ["sweep.yaml:4", "'gird'", "did you mean 'grid'"]),
    "an unknown key": ({BATCH: {"grid": [1]}}, {"polcy": "none"}, ["sweep.yaml:2", "'polcy'", "did you mean 'policy'"]),
    "an unknown part": ({"trainin.x": {"grid": [1]}}, {}, ["'trainin'", "did you mean 'training'"]),
    "an unknown setting": ({"stratgy": {"grid": [1]}}, {}, ["'stratgy'", "did you mean 'strategy'"]),
    "an unknown key of a part": (
        {"training.global_bach": {"grid": [1]}},
        {},
        ["sweep.yaml:3: parameters.training.global_bach", "did you mean 'global_batch'"],
    ),
    "an unknown device": (
        {"cluster.devices[west-gpus].memory": {"grid": ["1 GiB"]}},
        {},
        ["cluster.devices: unknown element 'west-gpus'", "did you mean 'west-gpu'"],
    ),
    "a link too many": ({"cluster.links[1].latency": {"grid": ["1 ms"]}}, {}, ["no element 1", "there are 1"]),
    "an argument that is not there": (
        {"model.arguments.widht": {"grid": [1]}},
        {},
        ["unknown key 'widht'", "did you mean 'width'"],
    ),
    "what has no parts": ({"training.global_batch.x": {"grid": [1]}}, {}, ["'training.global_batch' has no parts"]),
    "no path": ({"training..x": {"grid": [1]}}, {}, ["'training..x' is no path"]),
    "a part of a setting": ({"policy.horizon": {"grid": [1]}}, {}, ["parameters.policy.horizon", "unknown parameter"]),
    "an unknown field of a plan": ({"plan.conections": {"grid": [1]}}, {}, ["did you mean 'connections'"]),
    "too many points": (
        {BATCH: {"grid": [1, 2]}, LATENCY: {"uniform": ["1 ms", "2 ms"]}},
        {"draws": 1_000_000},
        ["2000000 points", "1000000 at most"],
    ),
    "no parameters": ({}, {}, ["there are no parameters"]),
    "no scenario": ({BATCH: {"grid": [1]}}, {"scenario": None}, ["'scenario' is missing"]),
    "an unknown scenario": ({BATCH: {"grid": [1]}}, {"scenario": "two-region"}, ["did you mean 'two-regions'"]),
    "an unknown policy": ({BATCH: {"grid": [1]}}, {"policy": "dept"}, ["did you mean 'depth'"]),
    "steps and duration": ({BATCH: {"grid": [1]}}, {"steps": 3, "duration": "1 s"}, ["'steps' and 'duration'"]),
    "steps swept beside a duration": ({"steps": {"grid": [1]}}, {"duration": "1 s"}, ["'steps' and 'duration'"]),
    "a bare duration": ({BATCH: {"grid": [1]}}, {"duration": "60"}, ["sweep.yaml:2: duration", "'60' has no unit"]),
    "a plan that is not there": ({BATCH: {"grid": [1]}}, {"plan": "p.json"}, ["p.json", "no such file"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_sweep(case: str, tmp_path: Path) -> None:
    parameters, settings, expected = WRONG[case]
    with pytest.raises(InputError) as refusal:
        sweep_of(tmp_path, parameters, **settings)
    for text in expected:
        assert text in str(refusal.value)
