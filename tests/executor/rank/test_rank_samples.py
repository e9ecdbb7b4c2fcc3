"""What a rank's process holds is on disk as soon as it is known."""

from pathlib import Path

from executor.rank.telemetry import SampleFile, read_samples, sample_resources


def test_a_sample_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "resources.jsonl"
    file, samples = SampleFile(path), []
    for step in range(3):
        samples.append(sample_resources(step, time_s=step / 2))
        file.append(samples[-1])
        assert read_samples(path) == samples
    file.close()
