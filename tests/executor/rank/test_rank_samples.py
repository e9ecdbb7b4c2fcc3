"""What a rank's process holds is on disk as soon as it is known."""

from contextlib import closing
from pathlib import Path

from executor.rank.telemetry import ResourceLog, read_samples


def test_a_sample_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "resources.jsonl"
    with closing(ResourceLog(path)) as log:
        for step in range(3):
            log.write(step, time_s=step / 2)
            assert [(each.step, each.time_s) for each in read_samples(path)] == [
                (done, done / 2) for done in range(step + 1)
            ]
