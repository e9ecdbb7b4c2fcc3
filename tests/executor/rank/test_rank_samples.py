"""What a rank's process holds is on disk as soon as it is known."""

from pathlib import Path

from executor.rank.telemetry import read_samples, write_sample


def test_a_sample_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "resources.jsonl"
    with path.open("w", buffering=1) as file:
        for step in range(3):
            write_sample(file, step, time_s=step / 2)
            assert [(each.step, each.time_s) for each in read_samples(path)] == [
                (done, done / 2) for done in range(step + 1)
            ]
