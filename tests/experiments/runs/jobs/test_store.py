"""The store against a model of it, through any sequence of requests, lost leases and restarts of the server."""

import shutil
import sqlite3
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from experiments.runs.jobs.messages import AttemptEnd, Heartbeat, Running
from experiments.runs.jobs.states import ENDED, MOST_ATTEMPTS, Outcome, State, choose_jobs, fits
from experiments.runs.jobs.store import ConflictError, Store, Submission, UnknownJobError
from traces.common.errors import InputError

LEASE_S = 10.0
HOSTS = ("one", "two")
KINDS = ("cpu", "gpu")

devices = st.dictionaries(st.sampled_from(KINDS), st.integers(1, 3), min_size=1)


@dataclass
class ModelJob:
    needed: dict[str, int]
    state: State = State.QUEUED
    attempt: int = 0
    host: str = ""


@dataclass
class ModelHost:
    incarnation: int
    offered: dict[str, int]
    until_s: float


@dataclass
class Model:
    """What the store must do, in the order of its requests and without a file."""

    jobs: dict[str, ModelJob] = field(default_factory=dict)
    hosts: dict[str, ModelHost] = field(default_factory=dict)

    def held(self, host: str) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.host == host]

    def lose(self, host: str) -> None:
        for job in self.held(host):
            self.end(job, Outcome.LOST)

    def end(self, job: ModelJob, outcome: Outcome) -> None:
        job.host = ""
        if outcome is not Outcome.LOST:
            job.state = State(outcome.value)
        elif job.state is State.STOPPING:
            job.state = State.STOPPED
        else:
            job.state = State.FAILED if job.attempt >= MOST_ATTEMPTS else State.QUEUED

    def expire(self, now_s: float) -> None:
        for name, host in self.hosts.items():
            if host.until_s <= now_s:
                self.lose(name)

    def place(self, name: str) -> None:
        offered = self.hosts[name].offered
        for job in self.jobs.values():
            used = Counter[str]()
            for each in self.held(name):
                used.update(each.needed)
            if job.state is not State.QUEUED or not fits(job.needed, offered):
                continue
            if any(used[kind] + count > offered[kind] for kind, count in job.needed.items()):
                return
            job.state, job.host, job.attempt = State.RUNNING, name, job.attempt + 1


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ropebridge-store-"))
        self.now_s = 1000.0
        self.store = Store(self.folder, LEASE_S, self.now_s)
        self.model = Model()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(needed=devices)
    def submit(self, needed: dict[str, int]) -> None:
        name = f"job-{len(self.model.jobs)}"
        submission = Submission("digits", needed, 5, name.encode())
        assert self.store.submit(name, submission, self.now_s)
        assert not self.store.submit(name, submission, self.now_s)
        with pytest.raises(ConflictError):
            self.store.submit(name, Submission("digits", needed, 5, b"another"), self.now_s)
        self.model.jobs[name] = ModelJob(needed)

    @rule(host=st.sampled_from(HOSTS), offered=devices, begins_anew=st.booleans(), steps=st.integers(0, 5))
    def hear(self, host: str, offered: dict[str, int], begins_anew: bool, steps: int) -> None:
        known = self.model.hosts.get(host)
        incarnation = 1 if known is None else known.incarnation + begins_anew
        if known is not None and begins_anew:
            self.model.lose(host)
        self.model.hosts[host] = ModelHost(incarnation, offered, self.now_s + LEASE_S)
        self.model.expire(self.now_s)
        self.model.place(host)
        claimed = [Running(job, 1, steps) for job in self.model.jobs]
        found = self.store.hear(host, Heartbeat(incarnation, offered, claimed), self.now_s)
        expected = [
            (name, job.attempt, job.state is State.STOPPING)
            for name, job in self.model.jobs.items()
            if job.host == host
        ]
        assert [(each.job, each.attempt, each.stops) for each in found] == expected
        with pytest.raises(ConflictError):
            self.store.hear(host, Heartbeat(incarnation - 1, offered, []), self.now_s)

    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def end(self, data: st.DataObject, outcome: Outcome) -> None:
        if not self.model.jobs:
            return
        name = data.draw(st.sampled_from(sorted(self.model.jobs)))
        job = self.model.jobs[name]
        attempt = data.draw(st.integers(max(0, job.attempt - 1), job.attempt + 1))
        counts = bool(job.host) and attempt == job.attempt
        is_repeated = job.state in ENDED and attempt == job.attempt
        if counts:
            self.model.end(job, outcome)
        for _ in range(2):
            found = self.store.end(name, AttemptEnd(attempt, outcome, "", 5), self.now_s)
            assert found == (counts or is_repeated)
            # A repetition is answered alike only where the job has ended: a lost attempt has been queued again.
            counts, is_repeated = False, job.state in ENDED and attempt == job.attempt

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        if not self.model.jobs:
            return
        name = data.draw(st.sampled_from(sorted(self.model.jobs)))
        job = self.model.jobs[name]
        job.state = {State.QUEUED: State.STOPPED, State.RUNNING: State.STOPPING}.get(job.state, job.state)
        assert self.store.stop(name, self.now_s) == job.state

    @rule(host=st.sampled_from(HOSTS), is_late=st.booleans())
    def leave(self, host: str, is_late: bool) -> None:
        known = self.model.hosts.get(host)
        if known is None:
            return
        self.store.leave(host, known.incarnation - is_late, self.now_s)
        if not is_late:
            self.model.lose(host)
            known.until_s = self.now_s

    @rule(passed_s=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def restart(self) -> None:
        with pytest.raises(InputError, match="another server"):
            Store(self.folder, LEASE_S, self.now_s)
        self.store.close()
        self.store = Store(self.folder, LEASE_S, self.now_s)
        for host in self.model.hosts.values():
            host.until_s = self.now_s + LEASE_S

    @invariant()
    def agrees(self) -> None:
        self.model.expire(self.now_s)
        found = self.store.jobs(self.now_s)
        described = [(job["id"], job["state"], job["attempt"], job["host"]) for job in found]
        assert described == [(name, job.state, job.attempt, job.host) for name, job in self.model.jobs.items()]

    @invariant()
    def each_job_ends_once_at_most(self) -> None:
        for name, job in self.model.jobs.items():
            events = self.store.job(name, self.now_s)["events"]
            ends = [event for event in events if event["state"] in ENDED]
            assert ends == (events[-1:] if job.state in ENDED else [])
            begun = [event["attempt"] for event in events if event["state"] == State.RUNNING]
            assert begun == list(range(1, job.attempt + 1))


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@given(queue=st.lists(devices, max_size=6), offered=devices)
def test_placement_fills_no_device_twice_and_lets_no_job_overtake_one_that_fits(
    queue: list[dict[str, int]], offered: dict[str, int]
) -> None:
    named = [(str(number), needed) for number, needed in enumerate(queue)]
    chosen = choose_jobs(named, offered, [])
    total = Counter[str]()
    for job in chosen:
        total.update(queue[int(job)])
    assert fits(total, offered)
    left = [job for job, needed in named if job not in chosen and fits(needed, offered)]
    # Whoever waits, and could run here, waits behind all that were chosen, and for a device that is missing.
    assert all(int(job) < int(left[0]) for job in chosen if left)
    if left:
        total.update(queue[int(left[0])])
        assert not fits(total, offered)


def test_the_file_itself_refuses_a_second_end(tmp_path: Path) -> None:
    store = Store(tmp_path, LEASE_S, 0.0)
    store.submit("job", Submission("digits", {"cpu": 1}, 5, b""), 0.0)
    store.stop("job", 1.0)
    store.close()
    database = sqlite3.connect(tmp_path / "jobs.sqlite")
    with pytest.raises(sqlite3.IntegrityError):
        database.execute(
            "INSERT INTO events(at_s, job, state, attempt, host, reason) VALUES (2, 'job', 'finished', 1, '', '')"
        )
    database.close()


@given(cuts=st.lists(st.integers(0, 40), max_size=5))
@settings(max_examples=20)
def test_a_log_is_whole_however_its_pieces_are_repeated(cuts: list[int]) -> None:
    text = bytes(range(40))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), LEASE_S, 0.0)
        store.submit("job", Submission("digits", {"cpu": 1}, 5, b""), 0.0)
        store.hear("one", Heartbeat(1, {"cpu": 1}, []), 0.0)
        for begin in [*cuts, 0]:
            # Only a piece that goes on where the log ends is added.
            have = store.add_log("job", 1, begin, text[begin : begin + 9])
            assert store.log("job", 1, 0, 100) == text[:have]
        while have < len(text):
            have = store.add_log("job", 1, have, text[have : have + 7])
        assert store.log("job", 1, 13, 5) == text[13:18]
        assert store.add_log("job", 2, 0, b"of no attempt") == 0
        store.close()


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_text("this is a letter, and long enough to be one" * 100)
    with pytest.raises(InputError, match="no store of jobs"):
        Store(tmp_path, LEASE_S, 0.0)
    store = Store(tmp_path / "new", LEASE_S, 0.0)
    with pytest.raises(UnknownJobError):
        store.job("none", 0.0)
    store.close()
