"""Runs that were ended and resumed have one record: that of the whole training."""

import json
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from executor.control.record.attempt_folder import AttemptFolder
from executor.control.record.joined_attempts import plans_before, with_earlier_attempts
from executor.core.job import CheckpointConfig, JobFolder, RunConfig
from executor.rank.facts import job_facts
from experiments.runs.folder import read_record
from experiments.runs.scenario import choose_scenario
from planner.adapt.policy import Decision
from planner.events.event import ABSENT, EventKind, EventWriter, fault_event, in_order, read_event_stream
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.runs.metrics import measure
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.process_watch import started, wait_until
from tests.helpers.scenarios.builders import chain_plan, chain_scenario

EVERY = 2


def killed_after(steps: int, options: list[str], checkpoints: Path) -> None:
    """Start a run of many steps, and kill its launcher once there is a checkpoint of ``steps`` steps."""
    folder = checkpoints.with_name(f"until-{steps}")
    folder.mkdir()
    arguments = ["run", "digits", *options, "--checkpoint-every", str(EVERY), "--steps", "20000"]
    with started(arguments, folder) as (process, _):
        enough = f"no checkpoint of {steps} steps comes"
        wait_until(lambda: any(checkpoints.glob(f"step-{steps:08d}/*.safetensors")), enough)
        process.send_signal(signal.SIGKILL)
        process.wait()


# The quick proof is in tests/executor/recovery/test_resume.py: attempts that end by themselves.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backups", "more"),
    [
        pytest.param([], 1, id="rows-of-ranks"),
        # Rows that the launcher collects, and two resumptions, the second with another plan.
        pytest.param(["--backup-every", "2"], 2, id="rows-of-launcher"),
    ],
)
def test_a_killed_run_that_goes_on_has_the_record_of_the_whole(backups: list[str], more: int, tmp_path: Path) -> None:
    checkpoints, whole = tmp_path / "checkpoints", tmp_path / "whole"
    options = ["--checkpoint", str(checkpoints), *backups]
    killed_after(4, ["--strategy", "gpipe", *options], checkpoints)
    strategy: list[str] = []
    for _ in range(more - 1):
        first = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
        killed_after(first + 4, ["--resume", *options], checkpoints)
        strategy = ["--strategy", "megatron"]
    steps = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")) + 3
    ended_s = time.time()
    done = ropebridge(
        "run", "digits", *options, *strategy, "--resume", "--steps", steps, "-o", tmp_path / "run", "--json"
    )
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run")
    undisturbed = ropebridge("run", "digits", "--strategy", "gpipe", "--steps", steps, "-o", whole, "--json")
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = read_record(whole)
    assert len(record.losses) == steps
    assert record.losses == pytest.approx(expected.losses, rel=1e-6)
    ends_s = step_ends_s(record.events)
    assert len(ends_s) == steps == measure(record).steps
    assert ends_s == sorted(ends_s)
    # Each action once: what was done after the checkpoint and lost is not there.
    actions = [
        (each.device, each.step, each.microbatch, each.action) for each in record.events if each.kind == "compute"
    ]
    assert len(actions) == len(set(actions))
    if not strategy:
        assert sorted(actions) == sorted(
            (each.device, each.step, each.microbatch, each.action) for each in expected.events if each.kind == "compute"
        )
    assert [each.change.split(":")[0] for each in record.decisions] == ["resumed with another plan"] * (more - 1)
    assert len(record.interruptions) == more
    for each in record.interruptions:
        assert 0 < each.end_s - each.start_s < ends_s[-1]
        assert ends_s[each.step - 1] == each.start_s
    assert json.loads(done.stdout)["samples_before"] == 0
    assert ends_s[-1] > time.time() - ended_s - 30


@pytest.mark.slow
def test_pipelines_that_do_not_wait_keep_the_rows_of_every_step(tmp_path: Path) -> None:
    """The checkpoint of one that is ahead is complete while the others have not come to its step."""
    checkpoints, steps = tmp_path / "checkpoints", 8
    options = ["--strategy", "cloudless", "--checkpoint", str(checkpoints), "--checkpoint-every", "10000"]
    losses = checkpoints / "record" / "0000" / "losses-1.jsonl"
    with started(["run", "digits", *options, "--steps", "20000"], tmp_path) as (process, _):
        wait_until(lambda: losses.exists() and len(losses.read_text().splitlines()) > steps, "nothing is trained", 0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows = [event for path in losses.parent.glob("events-*.arrows") for event in read_event_stream(path)]
    devices = {event.device for event in rows}
    assert len(devices) == 2
    done = {(event.device, event.step) for event in rows if event.kind == EventKind.COMPUTE}
    assert done >= {(device, step) for device in devices for step in range(steps)}


def test_what_is_torn_or_missing_is_left_out_with_a_word(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ropebridge("run", "digits", "--strategy", "gpipe", "--steps", 3, "-o", run).returncode == 0
    record = read_record(run)
    config = CheckpointConfig(tmp_path, EVERY, first_step=2)
    earlier = AttemptFolder.create(CheckpointConfig(tmp_path, EVERY), 0, record.plan, sees_arrivals=True)
    own = AttemptFolder.create(config, 16, record.plan, sees_arrivals=True)
    said: list[str] = []
    # The attempt before ended before second 0.
    own.begin(time.monotonic(), replaces=False)
    assert with_earlier_attempts(record, tmp_path, said.append) == record
    assert said == ["the record begins with step 3: nothing is left of the attempts before"]
    # It left a torn part of rows.
    earlier.begin(time.monotonic(), replaces=True)
    (earlier.path / "events-0.arrows").write_bytes(b"\xff\xff\xff\xff")
    assert with_earlier_attempts(record, tmp_path, said.append) == record
    assert said[1:] == said[:1]
    (earlier.path / "attempt.json").write_text("{")
    assert with_earlier_attempts(record, tmp_path, said.append) == record
    assert said[-1].startswith("the record has no earlier attempts, since their files are damaged: ")


def test_an_earlier_run_keeps_its_record_until_the_next_one_begins(tmp_path: Path) -> None:
    plan, config = make_plan("gpipe", choose_scenario("digits")), CheckpointConfig(tmp_path, EVERY)
    earlier = AttemptFolder.create(config, 0, plan, sees_arrivals=True)
    earlier.begin(time.monotonic(), replaces=True)
    own = AttemptFolder.create(config, 0, plan, sees_arrivals=True)
    assert earlier.path.is_dir()
    own.begin(time.monotonic(), replaces=True)
    assert list(own.path.parent.iterdir()) == [own.path]


def test_the_plans_of_attempts_that_go_on_with_each_other_are_found(tmp_path: Path) -> None:
    first = make_plan("gpipe", choose_scenario("digits"))
    second, third, other, given = (replace(first, strategy=name) for name in ("second", "third", "other", "given"))

    def attempt(first_step: int, plan: Plan, *decided: Plan, has_begun: bool = True) -> AttemptFolder:
        folder = AttemptFolder.create(CheckpointConfig(tmp_path, EVERY, first_step), 0, plan, sees_arrivals=True)
        if has_begun:
            folder.begin(time.monotonic(), replaces=False)
        for step, each in enumerate(decided, start=first_step):
            folder.add_decision(Decision(step, step + 2, each, "changed"), made_s=float(step))
        return folder

    def before(first_step: int, plan: Plan) -> list[Plan]:
        return list(plans_before(CheckpointConfig(tmp_path, EVERY, first_step), plan))

    assert before(4, first) == []
    earliest = attempt(0, first, other, second)
    attempt(4, second, third)
    assert before(8, third) == [second, first]
    assert before(8, replace(third, order="dynamic")) == [second, first]
    # The checkpoint is that of the first attempt.
    assert before(4, second) == [first]
    # An attempt that ended before second 0, and one that has not come past its checkpoint.
    attempt(8, given, has_begun=False)
    attempt(8, given)
    assert before(8, third) == [second, first]
    # The user has given another plan: nothing before it counts.
    assert before(8, given) == []
    attempt(8, given, third)
    assert before(12, third) == [given]
    (earliest.path / "attempt.json").write_text("{")
    assert before(8, third) == [second]


def test_hosts_agree_though_only_the_head_keeps_rows(tmp_path: Path) -> None:
    scenario, job, config = choose_scenario("digits"), JobFolder(tmp_path), RunConfig("real", 3, "none", False)
    plan = make_plan("gpipe", scenario)
    job.write(scenario, plan, config)
    head = replace(config, checkpoints="/head/checkpoints", attempt="/head/checkpoints/record/0000")
    assert job_facts(job, (scenario, plan, head)) == job_facts(job, (scenario, plan, config))


def test_an_attempt_that_did_not_come_to_the_checkpoint_is_left_out(tmp_path: Path) -> None:
    """The third attempt goes on from a checkpoint of the first one, since the second has written none."""
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0])
    record = Simulator().run(scenario, chain_plan(scenario), None, 6)

    def attempt(first_step: int, stop: int) -> AttemptFolder:
        checkpoints, samples = CheckpointConfig(tmp_path, EVERY, first_step), first_step * record.plan.global_batch
        folder = AttemptFolder.create(checkpoints, samples, record.plan, sees_arrivals=True)
        folder.begin(time.monotonic(), replaces=not first_step)
        rows = EventWriter(folder.published)
        rows.append(event for event in record.events if first_step <= event.step < stop)
        rows.close()
        return folder

    device, ends_s = record.plan.devices[0], step_ends_s(record.events)
    attempt(0, 6).add_absence(fault_event(device, ABSENT, 0.0, 2 * ends_s[-1]))
    attempt(2, 3)
    attempt(4, 6)
    said: list[str] = []
    whole = with_earlier_attempts(
        replace(record, events=[event for event in record.events if event.step >= 4]), tmp_path, said.append
    )
    assert not said
    (absence,) = (event for event in whole.events if event.kind is EventKind.FAULT)
    assert (absence.device, absence.end_s) == (device, ends_s[3])
    assert [each.step for each in whole.interruptions] == [4]
    rows = [replace(event, start_s=0, end_s=0, arrived_s=0) for event in whole.events if event is not absence]
    assert Counter(rows) == Counter(replace(event, start_s=0, end_s=0, arrived_s=0) for event in record.events)
    assert list(whole.events) == in_order(whole.events)
