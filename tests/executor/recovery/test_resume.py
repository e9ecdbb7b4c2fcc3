"""Runs that end, however they do, and go on from a checkpoint: as if nothing had been in between."""

import json
import os
import resource
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.control.record.joined_attempts import finished_record, is_recorded, with_earlier_attempts
from executor.core.job import CheckpointConfig
from executor.recovery.claim import resumption
from experiments.runs.folder import read_record
from planner.events.event import in_order
from planner.files.plan import read_plan, write_plan
from planner.files.scenario import read_scenario
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.runs.metrics import measure
from planner.scenario.faults import Absence
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from tests.executor.training.test_tensor_parallel import grouped_plan, on_one_host
from tests.helpers.processes.command import COMMAND, ropebridge
from tests.helpers.processes.process_watch import started, wait_until
from tests.helpers.processes.training import (
    CONVOLUTIONAL,
    GPT,
    assert_trained,
    chain,
    hybrid_plan,
    train_in_one_process,
)
from tests.helpers.scenarios.huggingface import GPT2, train_transformers, write_scenario
from traces.common.errors import InputError

STEPS, EVERY = 12, 3
FOUR_HEADS = replace(GPT, arguments={**GPT.arguments, "heads": 4})


def other_plan(scenario: Scenario) -> Plan:
    """Two stages, in which other devices have other layers."""
    layers = len(scenario.model.layers)
    return hybrid_plan(scenario, "gpipe", [([(3, [1.0, 1.0]), (layers - 3, [1.0])], [6, 6])])


@pytest.mark.parametrize(
    ("code", "optimizer"),
    [
        pytest.param(CONVOLUTIONAL, Optimizer("adamw", learning_rate=0.001), id="adamw"),
        pytest.param(GPT, Optimizer("momentum", learning_rate=0.05), id="momentum", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_with_the_same_plan_or_another(code: ModelCode, optimizer: Optimizer, tmp_path: Path) -> None:
    scenario, plan = chain(code, optimizer)
    folder, target = tmp_path / "checkpoints", tmp_path / "parameters.safetensors"
    TorchBackend("real", checkpoints=CheckpointConfig(folder, EVERY)).run(scenario, plan, None, 4)
    # The end of a run is a checkpoint too.
    step, known = resumption(folder, scenario, STEPS, print)
    assert (step, known) == (4, plan)
    other = other_plan(scenario)
    TorchBackend("real", checkpoints=CheckpointConfig(folder, EVERY, step)).run(scenario, other, None, 8)
    step, known = resumption(folder, scenario, STEPS, print)
    assert (step, known) == (8, other)
    backend = TorchBackend("real", parameters=target, checkpoints=CheckpointConfig(folder, EVERY, step))
    record = backend.run(scenario, plan, None, STEPS)
    assert {event.step for event in record.events} == set(range(8, STEPS))
    expected = train_in_one_process(scenario, STEPS)
    assert_trained(record, target, replace(expected, losses=expected.losses[8:]))
    said: list[str] = []
    whole = with_earlier_attempts(record, folder, said.append)
    assert not said
    assert_trained(whole, target, expected)
    assert (measure(whole).steps, whole.plan, whole.samples_before) == (STEPS, plan, 0)
    assert [each.plan for each in whole.decisions] == [other, plan]
    assert list(whole.events) == in_order(whole.events)
    ends_s = step_ends_s(whole.events)
    assert ends_s == sorted(ends_s)
    assert [(each.step, each.start_s) for each in whole.interruptions] == [(4, ends_s[3]), (8, ends_s[7])]
    assert all(each.start_s < each.end_s for each in whole.interruptions)
    # What was done is not trained again: the record and the parameters are those that the attempts have left.
    assert resumption(folder, scenario, STEPS, print) == (STEPS, plan)
    assert is_recorded(folder, STEPS)
    assert not is_recorded(folder, STEPS + 1)
    target.unlink()
    done = CheckpointConfig(folder, EVERY, STEPS)
    found = finished_record(replace(backend, checkpoints=done).run(scenario, plan, None, STEPS), done, said.append)
    assert not said
    assert_trained(found, target, expected)
    assert found == replace(whole, network=found.network)
    assert resumption(folder, scenario, STEPS, said.append, lambda _: False)[0] == STEPS - EVERY
    assert said == ["the run has done 12 steps, but its record lacks some: these are done again"]
    with pytest.raises(InputError, match="the run has done 12 steps"):
        resumption(folder, scenario, STEPS - 1, print)


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param((2, 1, 2), id="2-1-2"),
        pytest.param((2, 2, 2), id="2-2-2", marks=pytest.mark.slow),
        pytest.param((1, 2, 4), id="1-2-4", marks=pytest.mark.slow),
        pytest.param((4, 2, 1), id="4-2-1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "stages",
    [pytest.param((6,), id="one-stage", marks=pytest.mark.slow), pytest.param((2, 4), id="two-stages")],
)
def test_groups_go_on_with_the_same_number_of_devices_or_another(
    degrees: tuple[int, ...], stages: tuple[int, ...], tmp_path: Path
) -> None:
    # AdamW would make large what the order of sums changes; its state is tested by itself.
    scenario = on_one_host(FOUR_HEADS, 8, (2, 4))
    folder, target = tmp_path / "checkpoints", tmp_path / "parameters.safetensors"
    losses: list[float] = []
    plans: list[Plan] = []
    for index, degree in enumerate(degrees):
        # The first stage keeps its number of devices.
        groups = [(layers, [(degree if layers == stages[-1] else 2, 1.0)]) for layers in stages]
        plan, first, end = grouped_plan(scenario, groups, (6, 6)), 2 * index, 2 * index + 2
        if index:
            step, known = resumption(folder, scenario, STEPS, print)
            assert (step, known) == (first, plans[-1])
        backend = TorchBackend("real", parameters=target, checkpoints=CheckpointConfig(folder, EVERY, first))
        losses += backend.run(scenario, plan, None, end).losses
        plans.append(plan)
    expected = train_in_one_process(scenario, 6)
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    trained = load_file(target)
    assert trained.keys() == expected.parameters.keys()
    assert all((trained[name] - value).abs().max() <= 1e-6 for name, value in expected.parameters.items())


@pytest.mark.slow
def test_ranks_that_are_lost_after_a_resumption_begin_with_the_checkpoint(tmp_path: Path) -> None:
    """Before any copy is complete nobody has more than what the run began with."""
    scenario, plan = chain()
    folder, target = tmp_path / "checkpoints", tmp_path / "parameters.safetensors"
    TorchBackend("real", checkpoints=CheckpointConfig(folder, EVERY)).run(scenario, plan, None, 4)
    backend = TorchBackend(
        "real", parameters=target, backup_every=1000, checkpoints=CheckpointConfig(folder, EVERY, first_step=4)
    )
    faulty = replace(scenario, faults=(Absence("device-3", 0.3, 0.4),))
    record = backend.run(faulty, plan, None, 40)
    expected = train_in_one_process(scenario, 40)
    assert_trained(record, target, replace(expected, losses=expected.losses[4:]))


def run_json(*arguments: object) -> Any:
    done = ropebridge("run", *arguments, "--on-this-device", "--checkpoint-every", EVERY, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(None, id="same"),
        pytest.param([(6, [(4, 1.0)])], id="wider-group"),
        pytest.param([(2, [(1, 1.0)]), (4, [(1, 1.0)])], id="pipeline"),
        pytest.param([(3, [(2, 1.0)]), (3, [(2, 1.0)])], id="pipeline-of-groups"),
    ],
)
def test_a_command_goes_on_from_a_tensor_parallel_group(stages: Any, tmp_path: Path) -> None:
    """With tied embeddings and momentum. Without '--plan' the run goes on with the plan of the checkpoint."""
    path = write_scenario(tmp_path, GPT2, 4)
    scenario = read_scenario(path)
    assert scenario.training.optimizer.name == "momentum"
    used = before = tmp_path / "group.json"
    write_plan(grouped_plan(scenario, [(6, [(2, 1.0)])], (6, 6)), before)
    checkpoint = ("--checkpoint", tmp_path / "checkpoints")
    first = run_json(path, "--plan", before, *checkpoint, "--steps", 4, "-o", tmp_path / "first")
    if stages is not None:
        used = tmp_path / "other.json"
        write_plan(grouped_plan(scenario, stages, (6, 6)), used)
    plan = () if stages is None else ("--plan", used)
    again = run_json(path, *plan, *checkpoint, "--resume", "--steps", 8, "-o", tmp_path / "again")
    expected = train_transformers(scenario, GPT2, 8).losses
    assert first["losses"] == pytest.approx(expected[:4], rel=1e-6)
    # The summary counts the steps before too.
    assert again["losses"] == pytest.approx(expected, rel=1e-6)
    record = read_record(tmp_path / "again")
    assert record.plan == read_plan(before)
    # A resumption with another plan is a decision.
    assert [each.plan for each in record.decisions] == ([] if stages is None else [read_plan(used)])


SCENARIO = "cloud-edge-end-small"


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on(tmp_path: Path) -> None:
    checkpoints, undisturbed, resumed = (tmp_path / name for name in ("checkpoints", "undisturbed", "resumed"))
    options = ["--strategy", "gpipe", "--checkpoint", str(checkpoints), "--checkpoint-every", "2"]
    with started(["run", "digits", *options, "--steps", "20000"], tmp_path) as (process, _):
        wait_until(lambda: len(list(checkpoints.glob("step-*"))) > 2, "no checkpoints come")
        process.send_signal(signal.SIGKILL)
    again = ropebridge("run", "digits", *options, "--steps", "20")
    assert (again.returncode, again.stdout) == (2, "")
    assert "there are checkpoints here already; go on from them with '--resume'" in again.stderr
    newest = max(int(each.name.removeprefix("step-")) for each in checkpoints.glob("step-*"))
    steps = newest + 5
    done = ropebridge(
        "run", "digits", "--checkpoint", checkpoints, "--resume", "--steps", steps, "-o", resumed, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from the checkpoint of step" in done.stderr
    assert json.loads(done.stdout)["strategy"] == "gpipe"
    whole = ropebridge("run", "digits", "--strategy", "gpipe", "--steps", steps, "-o", undisturbed, "--json")
    assert json.loads(done.stdout)["losses"][-1] == pytest.approx(json.loads(whole.stdout)["losses"][-1], rel=1e-6)
    expected = load_file(undisturbed / "parameters.safetensors")
    trained = load_file(resumed / "parameters.safetensors")
    assert trained.keys() == expected.keys()
    assert all((trained[name] - value).abs().max() <= 1e-6 for name, value in expected.items())


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=32m ropebridge-test {place}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    command = [
        *COMMAND,
        "run",
        SCENARIO,
        "--strategy=megatron",
        "--on-this-device",
        "--checkpoint",
        f"{place}/c",
        "--checkpoint-every",
        "1",
        "--steps",
        "2000",
    ]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec {' '.join(command)}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    # The second line is there if one checkpoint fitted on the disk.
    line, *others = done.stderr.splitlines()
    assert [each.partition(" in ")[0] for each in others] in ([], ["last good checkpoint"])
    assert "No space left on device; make room, or choose another place; earlier checkpoints are complete" in line


@pytest.mark.slow
@pytest.mark.parametrize("backups", [[], ["--backup-every", "1"]], ids=["rows-of-ranks", "rows-of-launcher"])
def test_a_run_folder_that_was_not_written_is_written_from_the_record(backups: list[str], tmp_path: Path) -> None:
    """As after a launcher that was killed between the last checkpoint and the run folder."""
    options = ["run", "digits", *backups, "--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "2"]
    folder, before = tmp_path / "run", tmp_path / "before"
    done = ropebridge(*options, "--strategy", "gpipe", "--steps", "5", "-o", folder)
    assert done.returncode == 0, done.stderr
    folder.rename(before)
    again = ropebridge(*options, "--resume", "--steps", "5", "-o", folder)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "the run has done all 5 steps: its results are taken from its checkpoint and its record" in again.stderr
    ours, theirs = read_record(folder), read_record(before)
    assert list(ours.events) == list(theirs.events)
    assert (ours.losses, ours.plan, ours.interruptions) == (theirs.losses, theirs.plan, ())
    trained, expected = (load_file(each / "parameters.safetensors") for each in (folder, before))
    assert trained.keys() == expected.keys()
    assert all((trained[name] == value).all() for name, value in expected.items())


@pytest.mark.slow
def test_a_run_folder_that_was_written_is_the_result_of_resuming(tmp_path: Path) -> None:
    """As after a launcher that was killed when all was written; another run's folder stays, too."""
    folder, other = tmp_path / "run", tmp_path / "other"
    options = [
        "run",
        "digits",
        "--checkpoint",
        str(tmp_path / "checkpoints"),
        "--checkpoint-every",
        "2",
        "--steps",
        "4",
    ]
    done = ropebridge(*options, "-o", folder)
    assert done.returncode == 0, done.stderr
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = ropebridge(*options, "--resume", "-o", folder)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert ropebridge("run", "digits", "--steps", "2", "-o", other).returncode == 0
    refused = ropebridge(*options, "--resume", "-o", other)
    assert refused.returncode == 2
    assert "this path exists already" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", [0, 2_000, 50_000])
@pytest.mark.parametrize("backups", [[], ["--backup-every=1"]], ids=["no-copies", "copies"])
def test_whoever_cannot_write_ends_the_run_with_one_line(backups: list[str], most_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    options = ["--strategy=gpipe", "--checkpoint=c", "--checkpoint-every=2", "--steps=300", "-o", "run", *backups]
    done = subprocess.run(
        [*COMMAND, "run", "digits", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        # Python would cut the compiled modules that it writes at this limit, and every later process would read them.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path / "scratch")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
    )
    # Without a single byte no folder for temporary files can be used, which is found before anything begins.
    assert done.returncode == (1 if most_bytes else 2), done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith("step ")]) <= 2
    assert not list((tmp_path / "scratch").glob("ropebridge-*"))
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--resume"], "'--resume' needs '--checkpoint'; give the folder of the checkpoints"),
        (["--checkpoint-every", "3"], "'--checkpoint-every' needs '--checkpoint'"),
        (["--checkpoint", "{}", "--resume"], "there is no complete checkpoint"),
        (["--checkpoint", "{}", "--compute", "paced"], "--checkpoint: paced compute has no state for checkpoints"),
        (["--resume", "--compute", "paced"], "--resume: paced compute has no state for checkpoints"),
        (["--checkpoint", "{}", "--resume", "--compute", "paced"], "leave the option out, or choose '--compute real'"),
        (["--on-this-device", "--checkpoint", "/proc/none"], "no checkpoints can be written"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], expected: str, tmp_path: Path) -> None:
    done = ropebridge(
        "run", SCENARIO, "--strategy=megatron", *(option.format(tmp_path / "checkpoints") for option in options)
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert expected in line


def test_a_run_that_its_ranks_refuse_leaves_no_folder_for_checkpoints(tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir()
    for folder in (tmp_path / "not" / "yet", there):
        # Without '--on-this-device' the ranks, not the launcher, say that this machine is no Jetson.
        done = ropebridge("run", "two-regions", "--strategy=megatron", "--steps", 2, "--checkpoint", folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert "'--on-this-device'" in done.stderr
    assert list(tmp_path.iterdir()) == [there]
    assert not any(there.iterdir())


LATE_MISTAKE = """
import torch
class Model:
    layers = [*(torch.nn.Linear(4, 4) for _ in range(5)), torch.nn.Linear(4, 2)]
    def loss(self, outputs, targets):
        loss = (outputs - targets / 100).square()
        return loss.mean() if targets.max() < 12 * 10 else loss
    def samples(self, first, count):
        numbers = torch.arange(first, first + count, dtype=torch.float32)
        return torch.ones(count, 4), numbers[:, None].expand(count, 2)
def build():
    return Model()
"""


@pytest.mark.parametrize("before", [[], ["checkpoints"]], ids=["new", "empty"])
def test_what_a_run_has_trained_until_wrong_data_stays(before: list[str], tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(LATE_MISTAKE)
    folder = tmp_path / "checkpoints"
    for name in before:
        (tmp_path / name).mkdir()
    scenario, plan = chain(ModelCode(path, {}), Optimizer("momentum", learning_rate=0.05))
    found = 0
    # The second attempt goes on from what the first one has left.
    for _ in range(2):
        backend = TorchBackend("real", checkpoints=CheckpointConfig(folder, EVERY, found))
        with pytest.raises(InputError, match="'loss' returns"):
            backend.run(scenario, plan, None, STEPS)
        step, left = resumption(folder, scenario, STEPS, print)
        # Each rank writes a checkpoint before it copies the next one. The last one may not be written yet.
        assert max(found, 6) <= step <= 9
        assert left == plan
        found = step
