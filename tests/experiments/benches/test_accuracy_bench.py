import json
from pathlib import Path

import pytest

from experiments.benches.sailor.accuracy import measure_accuracy
from experiments.benches.sailor.measured_files import VARIABLE, MeasuredFiles, find_measured_files
from traces.common.errors import InputError

CURVE = [[0.0, 0.0, 10.0], 10e9]


def be_quiet(_: str) -> None:
    pass


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder as eth-easl/sailor lays it out, with a fabricated model of two layers and four runs of it."""
    row = {"0": [0.1, 0.2, 0.01], "1": [0.1, 0.2, 0.01]}
    layer = {"params_bytes": 10**8, "act_output_bytes": 10**7, "act_mem_bytes": 10**9}
    (tmp_path / "layer_times.json").write_text(json.dumps({"Toy-1": {"GH-96": {"1": {"1": row}}}}))
    (tmp_path / "layer_sizes.json").write_text(json.dumps({"Toy-1": {"1": {"0": layer, "1": layer}}}))
    network = {"zone": {"GH-96": {"1": {"zone": {"GH-96": {"1": CURVE}}}}}}
    (tmp_path / "providers").mkdir()
    (tmp_path / "providers" / "multizone_bandwidths_het.json").write_text(json.dumps(network))
    runs = tmp_path / "measured-toy-1m"
    runs.mkdir()
    for count in (1, 2, 3, 4):
        group = [[["GH-96", 1, "zone"]], 1]
        pipeline = {"layers_per_stage": [[0], [1]], "tmp_per_stage": [[group]] * 2, "dp": [1, 1]}
        run = {"pipeline_list": [pipeline], "mbs": 1, "gbs": count, "real": 0.3 * (count + 1), "max_mem": 8 * 10**9}
        (runs / f"run-{count}.json").write_text(json.dumps(run))
    return tmp_path


def test_a_folder_is_searched_for_what_is_not_given(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(measured))
    network = measured / "providers" / "multizone_bandwidths_het.json"
    times, sizes = measured / "layer_times.json", measured / "layer_sizes.json"
    assert find_measured_files() == MeasuredFiles(measured / "measured-toy-1m", times, sizes, network, "Toy-1")
    assert find_measured_files(network=Path("other")).network == Path("other")


def test_without_a_folder_it_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(InputError, match="there are no measured runs; give --runs, --times, --sizes and --network"):
        find_measured_files()


def test_nowhere_is_searched_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(InputError, match=f"^{VARIABLE} is not set: there are no measured runs; give --runs"):
        find_measured_files()


def test_a_folder_that_does_not_name_its_model_is_refused(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(measured))
    runs = measured / "measured-toy-1m"
    runs.rename(measured / "measured")
    with pytest.raises(InputError, match="does not contain the name of the model; give --model with one of Toy-1"):
        find_measured_files(runs=measured / "measured")


def test_any_folder_of_runs_is_simulated(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(measured))
    result = measure_accuracy(True, be_quiet)
    assert [row["run"] for row in result.rows] == ["run-1", "run-2", "run-3", "run-4"]
    # Two stages of 0.3 s a microbatch, and transfers of a millisecond or two.
    assert all(abs(float(row["step_error"])) < 0.05 for row in result.rows)
    assert {(row["constants"], row["network_share"]) for row in result.rows} == {("shipped", 0.77)}


def test_constants_are_fitted_to_other_sizes_of_cluster(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(measured))
    with pytest.raises(InputError, match="all runs are on clusters of one size; leave --refit out"):
        measure_accuracy(True, be_quiet, refit=True)
    path = measured / "measured-toy-1m" / "run-4.json"
    run = json.loads(path.read_text())
    (pipeline,) = run["pipeline_list"]
    pipeline["tmp_per_stage"], pipeline["dp"] = [pipeline["tmp_per_stage"][0] * 2] * 2, [2, 2]
    # Twice as many devices, with half of the network's rate for all that the constants can know.
    path.write_text(json.dumps(run | {"gbs": 8, "real": 3.0}))
    rows = measure_accuracy(True, be_quiet, refit=True).rows[4:]
    assert [row["constants"] for row in rows] == ["not 2 devices"] * 3 + ["not 4 devices"]
    assert rows[0]["network_share"] != rows[3]["network_share"]


def test_the_published_runs_meet_the_bars(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(shared_folder / "profiles" / "sailor"))
    result = measure_accuracy(True, be_quiet, refit=True)
    assert [str(check) for check in result.checks if not check.holds] == []
