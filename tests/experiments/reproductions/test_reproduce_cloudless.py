import json
from pathlib import Path

import pytest

from tests.helpers.processes.command import ropebridge

EVERY = [1, 2, 4, 8, 16]


@pytest.mark.slow
def test_the_quick_reproduction_holds_its_checks_and_shows_every_setting(tmp_path: Path) -> None:
    folder = tmp_path / "reproduced"
    result = ropebridge("reproduce", "cloudless", "--quick", "--json", "-o", folder)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document == json.loads((folder / "result.json").read_text())
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert all(check["holds"] for check in document["checks"])
    assert [row["settings"] for row in document["rows"]] == [6, 6, 2, 2, 2]
    parts = {
        part: [row for row in document["details"] if row["part"] == part] for part in ("cost", "speed", "ablation")
    }
    assert len(parts["cost"]) == 6
    assert [row["setting"].rpartition(" ")[2] for row in parts["speed"][:5]] == [str(every) for every in EVERY]
    for row in parts["cost"]:
        # Data 1:2 leave the older GPUs no slack: nothing is saved, and that is said.
        assert row["saving"] >= 0
        assert row["run_time_change"] <= 0.03
    for row, every in zip(parts["speed"], EVERY * (len(parts["speed"]) // 5), strict=True):
        assert row["bytes_ratio"] == every
    whole, without_elastic, without_strategy, without_both = parts["ablation"]
    assert whole["usd_per_million_samples"] < 0.9 * without_elastic["usd_per_million_samples"]
    assert whole["samples_per_s"] > 1.7 * without_strategy["samples_per_s"]
    assert without_both["usd_per_million_samples"] == max(row["usd_per_million_samples"] for row in parts["ablation"])
