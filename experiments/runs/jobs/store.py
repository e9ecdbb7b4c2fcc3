"""The server's durable store: jobs, hosts with their leases, logs and events in one SQLite file.

Every change is a transaction, which is on the disk when the method returns. So a server that is killed has either
done a request completely or not at all, and its successor goes on from the same file. Requests may be repeated: the
second time they change nothing.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from experiments.runs.jobs.messages import LOG_BYTES, Assignment, AttemptEnd, Heartbeat
from experiments.runs.jobs.states import (
    ENDED,
    ON_HOST,
    Devices,
    JobState,
    Outcome,
    State,
    choose_jobs,
    end,
    fits,
    lose,
    place,
    stop,
)
from traces.common.errors import InputError
from traces.common.locks import lock_file

_FILE, _LOCK = "jobs.sqlite", "lock"
_VERSION = 1

_TABLES = """
CREATE TABLE jobs(
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, scenario TEXT NOT NULL,
    devices TEXT NOT NULL, steps INTEGER NOT NULL, steps_done INTEGER NOT NULL, submitted_s REAL NOT NULL,
    state TEXT NOT NULL, attempt INTEGER NOT NULL, host TEXT NOT NULL, reason TEXT NOT NULL) STRICT;
CREATE TABLE bundles(job TEXT PRIMARY KEY REFERENCES jobs(id), content BLOB NOT NULL) STRICT;
CREATE TABLE hosts(
    name TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, devices TEXT NOT NULL, lease_until_s REAL NOT NULL) STRICT;
CREATE TABLE logs(
    job TEXT NOT NULL REFERENCES jobs(id), attempt INTEGER NOT NULL, first_byte INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY(job, attempt, first_byte)) STRICT;
CREATE TABLE events(
    number INTEGER PRIMARY KEY, at_s REAL NOT NULL, job TEXT NOT NULL REFERENCES jobs(id), state TEXT NOT NULL,
    attempt INTEGER NOT NULL, host TEXT NOT NULL, reason TEXT NOT NULL) STRICT;
CREATE INDEX of_job ON events(job);
-- A job ends once: the file itself refuses a second end.
CREATE UNIQUE INDEX one_end ON events(job) WHERE state IN ('finished', 'failed', 'stopped');
"""


class UnknownJobError(InputError):
    """The store has no job of this name."""


class ConflictError(InputError):
    """The request contradicts what the store has: another job of this name, or a later process of this host."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is submitted.

    Attributes:
        scenario: Name of the job's scenario.
        devices: The numbers of devices that the job needs, by kind.
        steps: Number of training steps.
        content: The job's files, packed.
    """

    scenario: str
    devices: Devices
    steps: int
    content: bytes


class Store:
    """The store in a folder; safe in several threads, and one process at a time has it.

    All times are seconds since the epoch, and are arguments, so that the store has no clock of its own.

    Args:
        folder: The folder of the store, which is made if it is missing.
        lease_s: Time in seconds after which a host that sends no heartbeat counts as lost.
        now_s: Time of the opening. Hosts get a whole lease from then on, since they could not be heard before.

    Raises:
        InputError: The folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path, lease_s: float, now_s: float) -> None:
        self.lease_s = lease_s
        self._mutex = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Jobs are their owner's alone, also in a folder that others can read.
            os.close(os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o600))
            self._lock = lock_file(folder / _LOCK)
        except BlockingIOError:
            raise InputError("another server uses this folder", str(folder), "end it, or choose another") from None
        except OSError as error:
            raise InputError(f"no jobs can be kept here: {error.strerror}", str(folder), "choose a folder") from None
        self._db = sqlite3.connect(folder / _FILE, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        try:
            self._open(folder)
            with self._change():
                self._db.execute("UPDATE hosts SET lease_until_s = ?", (now_s + lease_s,))
        except InputError:
            self.close()
            raise
        except sqlite3.Error as error:
            self.close()
            raise InputError(f"this is no store of jobs: {error}", str(folder / _FILE), "choose a new folder") from None

    def _open(self, folder: Path) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        # A commit must also survive a power failure.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise InputError(
                f"this store has version {version}", str(folder / _FILE), f"this ropebridge reads version {_VERSION}"
            )
        if not version:
            self._db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")

    def close(self) -> None:
        """Close the file, and let another process have it."""
        with self._mutex:
            self._db.close()
            self._lock.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Make the block a transaction: all of its changes are made, or none."""
        with self._mutex:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # --- users ---

    def submit(self, job: str, submission: Submission, now_s: float) -> bool:
        """Add a job at the end of the queue; return False if the store has it already.

        Raises:
            ConflictError: There is another job of this name.
        """
        digest = sha256(submission.content).hexdigest()
        with self._change():
            known = self._db.execute("SELECT digest FROM jobs WHERE id = ?", (job,)).fetchone()
            if known is not None:
                if known["digest"] != digest:
                    raise ConflictError(f"there is another job '{job}'", valid="submit this one under another name")
                return False
            self._db.execute(
                "INSERT INTO jobs(id, digest, scenario, devices, steps, steps_done, submitted_s, state, attempt, host,"
                " reason) VALUES (?, ?, ?, ?, ?, 0, ?, ?, 0, '', '')",
                (
                    job,
                    digest,
                    submission.scenario,
                    json.dumps(dict(submission.devices)),
                    submission.steps,
                    now_s,
                    State.QUEUED,
                ),
            )
            self._db.execute("INSERT INTO bundles VALUES (?, ?)", (job, submission.content))
            self._log_event(job, JobState(), now_s)
            return True

    def stop(self, job: str, now_s: float) -> State:
        """Ask a job to stop; return its new state, which stays the same if it has ended."""
        with self._change():
            known = self._state(job)
            self._set(job, known, stop(known), now_s)
            return self._state(job).state

    def jobs(self, now_s: float) -> list[dict[str, Any]]:
        """Return all jobs, the oldest first, as values for JSON."""
        with self._change():
            self._expire(now_s)
            return [self._described(row) for row in self._db.execute("SELECT * FROM jobs ORDER BY number")]

    def job(self, job: str, now_s: float) -> dict[str, Any]:
        """Return a job with its events, as values for JSON."""
        with self._change():
            self._expire(now_s)
            row = self._row(job)
            events = self._db.execute(
                "SELECT at_s, state, attempt, host, reason FROM events WHERE job = ? ORDER BY number", (job,)
            )
            return {**self._described(row), "events": [dict(event) for event in events]}

    def hosts(self, now_s: float) -> list[dict[str, Any]]:
        """Return all hosts that were heard, by name, as values for JSON."""
        with self._change():
            self._expire(now_s)
            return [
                {
                    "name": row["name"],
                    "devices": json.loads(row["devices"]),
                    "is_heard": row["lease_until_s"] > now_s,
                    "jobs": [job["id"] for job in self._on_host(row["name"])],
                }
                for row in self._db.execute("SELECT * FROM hosts ORDER BY name")
            ]

    def log(self, job: str, attempt: int, first_byte: int, most_bytes: int) -> bytes:
        """Return a part of what an attempt has printed, as far as its host has sent it."""
        with self._change():
            self._row(job)
            pieces = self._db.execute(
                "SELECT first_byte, content FROM logs WHERE job = ? AND attempt = ?"
                " AND first_byte + length(content) > ? AND first_byte < ? ORDER BY first_byte",
                (job, attempt, first_byte, first_byte + most_bytes),
            ).fetchall()
        if not pieces:
            return b""
        skipped = first_byte - pieces[0]["first_byte"]
        return b"".join(piece["content"] for piece in pieces)[skipped : skipped + most_bytes]

    # --- hosts ---

    def hear(self, host: str, heartbeat: Heartbeat, now_s: float) -> list[Assignment]:
        """Renew a host's lease, and place queued jobs on it; return everything that the host shall run.

        An assignment whose answer was lost on its way is in the next answer again.

        Raises:
            ConflictError: A process of this name, which began later, has taken the host's place.
        """
        with self._change():
            known = self._db.execute("SELECT incarnation FROM hosts WHERE name = ?", (host,)).fetchone()
            if known is not None and known["incarnation"] > heartbeat.incarnation:
                raise ConflictError(
                    f"another process is the host '{host}' now", valid="give each process a name of its own"
                )
            if known is not None and known["incarnation"] < heartbeat.incarnation:
                self._lose_all(host, f"host {host} began anew", now_s)
            self._db.execute(
                "INSERT INTO hosts VALUES (?, ?, ?, ?) ON CONFLICT(name) DO UPDATE SET"
                " incarnation = excluded.incarnation, devices = excluded.devices,"
                " lease_until_s = excluded.lease_until_s",
                (host, heartbeat.incarnation, json.dumps(heartbeat.devices), now_s + self.lease_s),
            )
            self._expire(now_s)
            for running in heartbeat.attempts:
                self._db.execute(
                    "UPDATE jobs SET steps_done = max(steps_done, ?) WHERE id = ? AND attempt = ? AND host = ?",
                    (running.steps, running.job, running.attempt, host),
                )
            self._place(host, heartbeat.devices, now_s)
            return [
                Assignment(
                    row["id"],
                    row["attempt"],
                    json.loads(row["devices"]),
                    row["state"] == State.STOPPING,
                    self._log_bytes(row["id"], row["attempt"]),
                )
                for row in self._on_host(host)
            ]

    def _place(self, host: str, offered: Devices, now_s: float) -> None:
        queue = self._db.execute("SELECT id, devices FROM jobs WHERE state = ? ORDER BY number", (State.QUEUED,))
        queued = [(row["id"], json.loads(row["devices"])) for row in queue]
        used = [json.loads(row["devices"]) for row in self._on_host(host)]
        for job in choose_jobs(queued, offered, used):
            known = self._state(job)
            self._set(job, known, place(known, host), now_s)

    def leave(self, host: str, incarnation: int, now_s: float) -> None:
        """Queue the jobs of a host again that ends on purpose."""
        with self._change():
            known = self._db.execute("SELECT incarnation FROM hosts WHERE name = ?", (host,)).fetchone()
            if known is not None and known["incarnation"] == incarnation:
                self._lose_all(host, f"host {host} has left", now_s)
                self._db.execute("UPDATE hosts SET lease_until_s = ? WHERE name = ?", (now_s, host))

    def end(self, job: str, report: AttemptEnd, now_s: float) -> bool:
        """Note that an attempt has ended; return False, and change nothing, if a later attempt counts by now."""
        with self._change():
            known = self._state(job)
            new = end(known, report.attempt, report.outcome, report.reason)
            if new is None:
                # The report may be a repetition, whose first answer was lost.
                return known.state in ENDED and known.attempt == report.attempt
            # Paced runs have no losses by which steps are counted.
            done = "UPDATE jobs SET steps_done = CASE WHEN ? THEN steps ELSE max(steps_done, ?) END WHERE id = ?"
            self._db.execute(done, (report.outcome is Outcome.FINISHED, report.steps, job))
            self._set(job, known, new, now_s)
            return True

    def add_log(self, job: str, attempt: int, first_byte: int, content: bytes) -> int:
        """Append to an attempt's log if the piece continues it; return how many bytes of the log the store has."""
        with self._change():
            known = self._state(job)
            have = self._log_bytes(job, attempt)
            if not content or first_byte != have or not 0 < attempt <= known.attempt or have >= LOG_BYTES:
                return have
            self._db.execute("INSERT INTO logs VALUES (?, ?, ?, ?)", (job, attempt, first_byte, content))
            return have + len(content)

    def content(self, job: str) -> bytes:
        """Return the packed files of a job."""
        with self._change():
            self._row(job)
            found: bytes = self._db.execute("SELECT content FROM bundles WHERE job = ?", (job,)).fetchone()["content"]
            return found

    # --- inside a transaction ---

    def _expire(self, now_s: float) -> None:
        """Lose the attempts of hosts whose leases have run out."""
        silent = self._db.execute("SELECT name FROM hosts WHERE lease_until_s <= ?", (now_s,)).fetchall()
        for row in silent:
            self._lose_all(row["name"], f"host {row['name']} was not heard for {self.lease_s:g} s", now_s)

    def _lose_all(self, host: str, reason: str, now_s: float) -> None:
        for row in self._on_host(host):
            known = self._state(row["id"])
            self._set(row["id"], known, lose(known, reason), now_s)

    def _on_host(self, host: str) -> Sequence[sqlite3.Row]:
        states = ", ".join(f"'{state}'" for state in sorted(ON_HOST))
        query = f"SELECT * FROM jobs WHERE host = ? AND state IN ({states}) ORDER BY number"
        return self._db.execute(query, (host,)).fetchall()

    def _row(self, job: str) -> sqlite3.Row:
        row: sqlite3.Row | None = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone()
        if row is None:
            raise UnknownJobError(f"there is no job '{job}'", valid="'ropebridge jobs status' lists all")
        return row

    def _state(self, job: str) -> JobState:
        row = self._row(job)
        return JobState(State(row["state"]), row["attempt"], row["host"], row["reason"])

    def _set(self, job: str, old: JobState, new: JobState, now_s: float) -> None:
        if new == old:
            return
        self._db.execute(
            "UPDATE jobs SET state = :state, attempt = :attempt, host = :host, reason = :reason WHERE id = :id",
            {**asdict(new), "id": job},
        )
        self._log_event(job, new, now_s)

    def _log_event(self, job: str, state: JobState, now_s: float) -> None:
        self._db.execute(
            "INSERT INTO events(at_s, job, state, attempt, host, reason)"
            " VALUES (:at_s, :job, :state, :attempt, :host, :reason)",
            {**asdict(state), "job": job, "at_s": now_s},
        )

    def _log_bytes(self, job: str, attempt: int) -> int:
        query = "SELECT coalesce(sum(length(content)), 0) FROM logs WHERE job = ? AND attempt = ?"
        found: int = self._db.execute(query, (job, attempt)).fetchone()[0]
        return found

    def _described(self, row: sqlite3.Row) -> dict[str, Any]:
        devices = json.loads(row["devices"])
        reason = row["reason"]
        if row["state"] == State.QUEUED:
            with closing(self._db.execute("SELECT devices FROM hosts")) as hosts:
                if not any(fits(devices, json.loads(host["devices"])) for host in hosts):
                    reason = "no host that was heard offers these devices"
        return {
            "id": row["id"],
            "scenario": row["scenario"],
            "state": row["state"],
            "host": row["host"],
            "attempt": row["attempt"],
            "steps_done": row["steps_done"],
            "steps": row["steps"],
            "devices": devices,
            "submitted_s": row["submitted_s"],
            "reason": reason,
        }
