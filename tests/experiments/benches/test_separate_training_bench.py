import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.benches.kept import KeptResults
from experiments.benches.regions.separate_training import methods, run_name
from planner.scenario.training import COMPRESSIONS
from tests.helpers.processes.command import ropebridge
from traces.common.errors import InputError

QUICK_STEPS, SEEDS = 300, 2

# Losses by method: what the synchronous training, and all others, have.
LOSSES = {"allreduce": 2.0, "diloco": 2.04}


def quick_runs() -> Iterator[tuple[str, str]]:
    """Yield the methods of the quick bench, and the names of their runs."""
    cases = [("allreduce", 2, 1), *((f"two stages, {each}", 0, 1) for each in COMPRESSIONS)]
    cases += [(name, 2, interval) for interval in (10, 50) for name, _ in methods(interval)]
    for seed in range(SEEDS):
        yield from ((name, run_name(name, workers, interval, QUICK_STEPS, seed)) for name, workers, interval in cases)


def test_runs_that_are_kept_are_not_repeated(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path)
    for method, name in quick_runs():
        kept.write(name, {"loss": LOSSES.get(method, 2.1), "sent_bytes": 3e6})
    done = ropebridge("bench", "diloco", "--quick", "--count", SEEDS, "--keep", tmp_path, "--json")
    found = json.loads(done.stdout)
    # No process has trained, and the figures are those of the files.
    assert {row["sent_mb"] for row in found["rows"]} == {3.0}
    ratios = {row["method"]: row["to_synchronous"] for row in found["rows"]}
    assert (ratios["allreduce"], ratios["diloco"], ratios["averages"]) == (1.0, 1.02, 1.05)
    of_synchronous, of_diloco = found["checks"]
    assert (of_synchronous["value"], of_synchronous["holds"]) == (1.02, True)
    assert (of_diloco["value"], of_diloco["holds"]) == (pytest.approx(2.1 / 2.04), False)
    assert done.returncode == 1


def test_a_kept_run_without_a_loss_is_named(tmp_path: Path) -> None:
    (tmp_path / f"{run_name('allreduce', 2, 1, QUICK_STEPS, 0)}.json").write_text('{"sent_bytes": 3}')
    done = ropebridge("bench", "diloco", "--quick", "--keep", tmp_path)
    assert done.returncode == 2
    assert "allreduce-2-1-300-0.json: no results of a case are in this file; remove it" in done.stderr


def test_kept_documents_are_read_again(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path / "kept")
    kept.write("one", {"loss": 1.5})
    assert KeptResults(tmp_path / "kept").read("one") == {"loss": 1.5}
    assert kept.read("two") is None
    (tmp_path / "kept" / "two.json").write_text("{")
    with pytest.raises(InputError, match=r"two.json: no results of a case are in this file"):
        kept.read("two")
    KeptResults(None).write("one", {})
    assert KeptResults(None).read("one") is None


def test_rows_are_measured_once(tmp_path: Path) -> None:
    kept, measured = KeptResults(tmp_path), [[{"gain": 1.5}], [{"gain": 2.5}]]
    assert kept.rows("lte, 3/4 of it", measured.pop) == [{"gain": 2.5}]
    assert kept.rows("lte, 3/4 of it", measured.pop) == [{"gain": 2.5}]
    assert [path.name for path in tmp_path.iterdir()] == ["lte-3-4-of-it.json"]
    assert KeptResults(None).rows("lte, 3/4 of it", measured.pop) == [{"gain": 1.5}]
    lost, found = [{"lost": 1}], [{"lost": 0}]
    assert [
        kept.rows("killed", lambda rows=rows: rows, lambda row: not row["lost"]) for rows in (lost, found, lost)
    ] == [
        lost,
        found,
        found,
    ]
    for damaged in ({"gain": 1.5}, []):
        kept.write("damaged", damaged)
        with pytest.raises(InputError, match=r"damaged.json: no results of a case are in this file"):
            kept.rows("damaged", measured.pop)
