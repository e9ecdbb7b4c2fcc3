"""Runs that train on data which the scenario names: they go on where they stopped, and leave no process behind."""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from experiments.benches.processes import marked_processes
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.process_watch import left_behind, started, wait_until
from tests.helpers.processes.token_files import tokens_of, write_scenario, write_tokens

DATASET = """
import torch


class Items(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = (index + 5 * torch.arange(17) + torch.randint(0, 3, (17,))) % 32
        return tokens[:-1], tokens[1:]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, size):
        self.items, self.next = Items(size), 0

    def __iter__(self):
        while self.next < len(self.items):
            self.next += 1
            yield self.items[self.next - 1]


class Stateful(Stream):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def build(*, kind="Items", size=50):
    return globals()[kind](size)
"""

DATA = {
    "tokens": "{tokens: tokens, length: 16}",
    "tokens-ahead": "{tokens: tokens, length: 16, workers: 2}",
    "indexed": "{dataset: dataset.py, arguments: {size: 37}}",
    "streamed": "{dataset: dataset.py, arguments: {kind: Stream}}",
    "stateful": "{dataset: dataset.py, arguments: {kind: Stateful}}",
}
# The others are run by `make test-slow`.
QUICK = ("tokens-ahead",)


def scenario_in(folder: Path, data: str) -> Path:
    write_tokens(folder / "tokens", [tokens_of(seed, 700) for seed in range(2)])
    (folder / "dataset.py").write_text(DATASET)
    return write_scenario(folder, DATA[data])


def trained(scenario: Path, *options: object) -> Any:
    done = ropebridge("run", scenario, "--on-this-device", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "data", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in DATA]
)
def test_training_goes_on_with_another_plan_as_if_it_had_not_stopped(data: str, tmp_path: Path) -> None:
    scenario = scenario_in(tmp_path, data)
    whole = trained(scenario, "--strategy", "gpipe", "--steps", 12)
    checkpoints = ["--checkpoint", tmp_path / "checkpoints", "--checkpoint-every", 3]
    first = trained(scenario, "--strategy", "gpipe", "--steps", 5, *checkpoints)
    # The other plan has one stage with two replicas, of which each reads inputs and targets of its samples.
    other = tmp_path / "plan.json"
    assert ropebridge("plan", scenario, "--strategy", "ddp", "-o", other).returncode == 0
    rest = trained(scenario, "--plan", other, "--steps", 12, "--resume", *checkpoints)
    assert first["losses"] == pytest.approx(whole["losses"][:5], rel=1e-6)
    # The record of the resumed run is that of the whole one.
    assert rest["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert [each["step"] for each in rest["interruptions"]] == [5]
    states = sorted(path.name for path in (tmp_path / "checkpoints" / "data").glob("*"))
    assert bool(states) == (data == "stateful")


@pytest.mark.slow
def test_a_run_from_the_first_step_keeps_no_states_of_an_earlier_one(tmp_path: Path) -> None:
    """Its data set may be another one, whose states it would go on from when it resumes."""
    scenario = scenario_in(tmp_path, "stateful")
    options = ["--strategy", "gpipe", "--checkpoint", tmp_path / "checkpoints", "--checkpoint-every", 3]
    trained(scenario, "--steps", 5, *options)
    for old in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(old)
    (tmp_path / "dataset.py").write_text(DATASET.replace("self.next += 1", "self.next += 2"))
    whole = trained(scenario, "--strategy", "gpipe", "--steps", 7)
    trained(scenario, "--steps", 4, *options)
    rest = trained(scenario, "--steps", 7, "--resume", *options)
    assert rest["losses"] == pytest.approx(whole["losses"], rel=1e-6)


def test_processes_load_data_whatever_the_length_of_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a Unix socket, by which they send tensors, has 107 characters at most."""
    scenario = scenario_in(tmp_path, "indexed")
    folder = tmp_path / ("temporary" * 12)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert len(trained(scenario, "--strategy", "gpipe", "--steps", 3)["losses"]) == 3
    assert not [*folder.glob("ropebridge-*"), *folder.glob("pymp-*")]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_processes_that_load_data_end_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    scenario = scenario_in(tmp_path, "indexed")
    options = ["--on-this-device", "--strategy", "gpipe", "--steps", "1000000"]
    with started(["run", str(scenario), *options], tmp_path) as (process, mark):
        wait_until(lambda: len(_loading(mark)) == 2, "no process loads data")
        process.send_signal(number)
    if number is signal.SIGINT:
        assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_rank_that_is_killed_takes_its_process_along_and_is_replaced(tmp_path: Path) -> None:
    scenario = scenario_in(tmp_path, "indexed")
    options = ["--on-this-device", "--strategy", "gpipe", "--steps", "1000000", "--backup-every", "2"]
    with started(["run", str(scenario), *options], tmp_path) as (process, mark):
        wait_until(lambda: len(_loading(mark)) == 2, "no process loads data")
        before = _loading(mark)
        victim = before.pop()
        rank = int((Path("/proc") / str(victim) / "stat").read_text().rpartition(")")[2].split()[1])
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: victim not in _loading(mark), "the process outlives its rank")
        wait_until(lambda: len(_loading(mark)) == 2, "the new rank loads no data")
        process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_process_that_loads_data_and_is_killed_ends_the_run_with_a_message(tmp_path: Path) -> None:
    options = ["--on-this-device", "--strategy", "gpipe", "--steps", "1000000"]
    with started(["run", str(scenario_in(tmp_path, "indexed")), *options], tmp_path) as (process, mark):
        wait_until(lambda: len(_loading(mark)) == 2, "no process loads data")
        os.kill(_loading(mark).pop(), signal.SIGKILL)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a process that loads data has ended: DataLoader worker" in said
    assert "Traceback" not in said


def _loading(mark: str) -> set[int]:
    """Processes of a run that load data."""
    found = set()
    for pid in marked_processes(mark):
        path = Path("/proc") / str(pid) / "comm"
        try:
            if path.read_text().startswith("data "):
                found.add(pid)
        except OSError:
            continue
    return found
