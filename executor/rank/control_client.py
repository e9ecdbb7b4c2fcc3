"""A rank's connection to the control server of its job; executor/control/control_server.py lists the messages.

One thread receives the head's messages and keeps their contents until another thread waits for them.
"""

import base64
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.core.control_channel import HEAD_ADDRESS, Channel, Message, reach_head, read_key
from executor.core.failures import SharedInputError, SharedRunError, first_line
from executor.core.job import FILE_KINDS, INCARNATION, JobFolder
from executor.core.messages import CheckpointMark, NewPlan, SessionSpec
from executor.core.timeouts import timeouts
from executor.rank.handshake import Facts, Statement
from planner.adapt.policy import DECISION_LAG_STEPS
from traces.common.errors import InputError, RopebridgeError

# The largest number of published steps that the head has not heard, after which a rank waits: so many are kept, since
# another head may ask for them.
MOST_UNHEARD = 1024

# How a session ends: `ENDED` if another session follows, `FINISHED` at the end of the run.
ENDED, FINISHED = "ended", "finished"

_PIECE_BYTES = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Agreed(Generic[T]):
    """The result of an agreement of all ranks.

    Attributes:
        value: The value that this rank has prepared.
        token: A random name, the same on all ranks.
        now_s: Reading of the head's monotonic clock when the head found that all agree; the same on all ranks.
    """

    value: T
    token: str
    now_s: float


class SessionEndedError(Exception):
    """The session has ended, since a rank or a connection is lost or ranks join; another session follows."""


class ControlClient:
    """The rank's end of its connection to the head.

    Args:
        job: The job's folder on this host, which contains the key.
        name: Name of the rank in messages.

    Attributes:
        own_address: The address of this host on the way to the head.
        is_remote: Whether the head is on another host, and so has another monotonic clock.
        is_ending: Whether the session has ended, or the function of `call_at_end` is being called.
        outlives_head: Whether this process goes on when the head is lost, and connects to the next one.
    """

    def __init__(self, job: JobFolder, rank: int, name: str) -> None:
        host, port, silence_s = json.loads(os.environ[HEAD_ADDRESS])
        self.name = name
        self.rank = rank
        self._changed = threading.Condition()
        self._agreed: dict[str, Message] = {}
        self._values: dict[str, bytes] = {}
        self._spec: SessionSpec | None = None
        self._plans: dict[int, NewPlan] = {}
        self._durables: dict[int, int] = {}
        # By step the checkpoint that the state before it belongs to; other steps are missing.
        self._marks: dict[int, CheckpointMark] = {}
        self._readings: dict[int, float] = {}
        self._questions = 0
        self._outcome = ""
        # Number of the steps after which the session ends; infinite while this is not known.
        self._end_step = math.inf
        self._calls: dict[str, Callable[[Message], None]] = {}
        # Published steps that the head may not have heard.
        self._unheard: dict[int, Message] = {}
        # The last step of which the head has kept all rows, and the last session that has begun.
        self._heard = -1
        self._begun: SessionSpec | None = None
        self.is_ending = self.outlives_head = False
        self._on_end: Callable[[], None] = lambda: None
        self.is_remote = silence_s > 0
        self._reach = partial(reach_head, (host, port), read_key(job.key), silence_s)
        self._channel = self._connect(timeouts().reach_s)
        self.own_address = self._channel.own_address
        threading.Thread(target=self._receive, name="control", daemon=True).start()

    def _connect(self, wait_s: float) -> Channel:
        channel = self._reach(wait_s)
        channel.send("hello", rank=self.rank, incarnation=int(os.environ.get(INCARNATION, "0")))
        return channel

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send the head a message; safe in any thread."""
        self._channel.send(kind, payload, **fields)

    # --- before a session ---

    def agree(
        self,
        topic: str,
        count: int,
        prepare: Callable[[], tuple[T, Facts]],
        wait_s: float,
        *,
        wrong_input: bool = False,
    ) -> Agreed[T]:
        """Prepare a value on every rank; return this rank's value after the head has found that all facts are equal.

        Args:
            topic: Name of the agreement, used once in a run.
            count: Number of ranks that take part: ranks 0 to ``count - 1``.
            prepare: Returns the value of this rank, and the facts that must be equal on all ranks.
            wait_s: How long the head waits for the other ranks, in seconds.
            wrong_input: Whether a difference is an error in the user's input.

        Raises:
            RopebridgeError: A rank could not prepare its value, has other facts, or did not take part in time; the
                message is the same on every rank.
            SessionEndedError: The session has ended meanwhile.
        """

        def state(facts: Facts, failure: str, *, is_input: bool) -> None:
            statement = asdict(Statement(self.name, facts, failure, is_input))
            self.send("agree", topic=topic, count=count, wait_s=wait_s, statement=statement)

        try:
            prepared, facts = prepare()
        except RopebridgeError as error:
            state({}, str(error), is_input=isinstance(error, InputError))
            self._hear_agreement(topic)
            raise
        except Exception as error:
            state({}, first_line(error), is_input=False)
            raise
        state(facts, "", is_input=wrong_input)
        answer = self._hear_agreement(topic)
        return Agreed(prepared, answer["token"], answer["now_s"])

    def _hear_agreement(self, topic: str) -> Message:
        with self._changed:
            self._changed.wait_for(lambda: topic in self._agreed or self._outcome == ENDED)
            if topic not in self._agreed:
                raise SessionEndedError
            answer = self._agreed.pop(topic)
        if answer["error"] is not None:
            raise (SharedInputError if answer["wrong_input"] else SharedRunError)(answer["error"])
        return answer

    def ask_clock(self) -> float:
        """Return a reading of the head's monotonic clock; raise `TimeoutError` after `Timeouts.clock_answer_s`."""
        self._questions += 1
        number = self._questions
        self.send("clock", asked=number)
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._readings, timeouts().clock_answer_s):
                raise TimeoutError
            return self._readings.pop(number)

    def await_session(self) -> SessionSpec | None:
        """Wait for the next session of this rank; return its specification, or None at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._spec is not None or self._outcome == FINISHED)
            spec, self._spec = self._spec, None
            return spec

    def begin(self, spec: SessionSpec) -> None:
        """Begin the only session of a run without recovery, for which the head sends no specification."""
        with self._changed:
            self._begin(spec)

    # --- during a session ---

    def call_at_end(self, on_end: Callable[[], None]) -> None:
        """Register a function that the receiving thread calls if the session ends before the run."""
        self._on_end = on_end

    def call_on(self, kind: str, function: Callable[[Message], None]) -> None:
        """Register a function that the receiving thread calls with each message of a kind."""
        self._calls[kind] = function

    def known(self, step: int) -> NewPlan | None:
        """Return the plan of a step; None if the plan has not arrived."""
        with self._changed:
            return self._plans.get(step)

    def wait(self, step: int) -> NewPlan:
        """Wait for the plan of a step, and return it; raise `SessionEndedError` if the session ends."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._plans or self._outcome)
            if step not in self._plans:
                raise SessionEndedError
            return self._plans[step]

    def wait_unless_last(self, step: int) -> NewPlan | None:
        """Wait for the plan of a step, and return it; None if the session ends before that step.

        Raises `SessionEndedError` if the session is ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: step in self._plans or step >= self._end_step or self._outcome)
            if step in self._plans:
                return self._plans[step]
            if step >= self._end_step:
                return None
            raise SessionEndedError

    def publish(self, session: int, step: int, part: Mapping[str, Any], *, keeps: bool) -> None:
        """Send the head this rank's part of a step.

        With ``keeps`` the part is kept until the head has heard it; if `MOST_UNHEARD` parts are kept, wait.
        """
        message = {"kind": "step", "session": session, "step": step, "part": part}
        if keeps:
            with self._changed:
                self._changed.wait_for(lambda: len(self._unheard) < MOST_UNHEARD or self._outcome)
                self._unheard[step] = message
        self._channel.send_plain(message)

    def first_unheard(self) -> float:
        """Return the first published step that the head may not have heard; infinity if it has heard all."""
        with self._changed:
            return min(self._unheard, default=math.inf)

    def await_heard(self, step: int) -> bool:
        """Wait until the head has kept all ranks' rows up to a step; return False if the step is to be repeated."""
        with self._changed:
            own = self._begun
            self._changed.wait_for(lambda: self._heard >= step or self._outcome or self._begun is not own)
            is_repeated = self._begun is not None and self._begun is not own and self._begun.first_step <= step
            return self._heard >= step and not is_repeated

    def settle(self) -> None:
        """Wait until the head has heard all published steps, or the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unheard or self._outcome)

    def mark(self, step: int) -> CheckpointMark | None:
        """Return the checkpoint that the state before a step belongs to; None if it is none."""
        with self._changed:
            return self._marks.pop(step, None)

    def durable(self, step: int) -> int:
        """Return the newest step before which copies were complete when the plan of ``step`` was decided."""
        with self._changed:
            return self._durables[step]

    def outcome(self, wait_s: float | None = None) -> str:
        """Wait for the end of the session; return `FINISHED` or `ENDED`, or an empty text after ``wait_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome, wait_s)
            return self._outcome

    def report(self, session: int, copies: Mapping[int, frozenset[int]], now_s: float, unpublished: Any) -> None:
        """Report this rank's copies (layers by step) and the rows of unpublished steps to the head, after a session."""
        held = {step: sorted(layers) for step, layers in copies.items()}
        self.send("report", session=session, copies=held, now_s=now_s, unpublished=unpublished)

    def send_files(self, job: JobFolder) -> None:
        """Send the head all files of this rank from the job's folder on this host."""
        for kind in FILE_KINDS:
            path = job.of_rank(kind, self.rank)
            if path.exists():
                with path.open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        self.send("file", piece, file=kind)
                self.send("file", file=kind)
        self.send("files-sent")

    # --- messages from the head ---

    def _receive(self) -> None:
        try:
            self._receive_all()
            while self.outlives_head and self._outcome != FINISHED:
                self._connect_again()
                self._receive_all()
        except Exception:
            # Written to the rank's log, the last lines of which the agent sends to the head.
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            if self._outcome != FINISHED:
                # Without a message: the head has ended, or continues without this process, for an unknown reason.
                os.kill(os.getpid(), signal.SIGKILL)

    def _receive_all(self) -> None:
        while (message := self._channel.receive()) is not None:
            if message["kind"] == ENDED:
                # Close the connections first, before other threads see the end of the session and drop them.
                self.is_ending = True
                self._on_end()
            with self._changed:
                self._take(message)
                self._changed.notify_all()
            if message["kind"] in self._calls:
                self._calls[message["kind"]](message)

    def _connect_again(self) -> None:
        """Connect to the head that follows a lost one, and send it the steps that it may not have heard."""
        self._channel.close()
        channel = self._connect(timeouts().attach_s)
        with self._changed:
            self._channel = channel
            for message in self._unheard.values():
                channel.send_plain(message)

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "agreed":
            self._agreed[message["topic"]] = message
        elif kind == "store":
            self._values[message["key"]] = base64.b64decode(message["value"])
        elif kind == "clock":
            self._readings[message["asked"]] = message["now_s"]
        elif kind == "begin":
            self._spec = SessionSpec.from_data(message)
            self._begin(self._spec)
        elif kind == "plan":
            self._take_plan(message["step"], message)
        elif kind == "heard":
            self._heard = message["step"]
            self._unheard = {step: each for step, each in self._unheard.items() if step > self._heard}
        elif kind == "last":
            self._end_step = message["step"]
        elif kind in (ENDED, FINISHED):
            self._outcome = kind

    def _begin(self, spec: SessionSpec) -> None:
        self._outcome, self.is_ending, self._end_step = "", False, math.inf
        self._begun, self._heard = spec, spec.first_step - 1
        self._plans = dict(enumerate(spec.plans, spec.first_step))
        self._durables = dict.fromkeys(self._plans, spec.durable)
        self._agreed.clear()
        self._values = {key: value for key, value in self._values.items() if spec.store_prefix in key}

    def _take_plan(self, step: int, message: Message) -> None:
        new = message["new"]
        self._plans[step] = self._plans[step - 1].after(1) if new is None else NewPlan.from_data(new)
        self._durables[step] = message["durable"]
        if message.get("mark") is not None:
            self._marks[step] = CheckpointMark.from_data(message["mark"])
        for old in (self._plans, self._durables):
            old.pop(step - DECISION_LAG_STEPS - 1, None)


class ControlStore(Store):
    """A torch store, through which gloo exchanges addresses; the control server sends every value to all ranks."""

    def __init__(self, client: ControlClient) -> None:
        super().__init__()
        self._client = client

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value on all ranks."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._client.send("store", key=key, value=base64.b64encode(raw).decode())

    def get(self, key: str) -> bytes:
        """Wait for the value of a key, and return it."""
        self.wait([key])
        return self._client._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for the values of keys; raise `RuntimeError` after ``timeout``, or if the session has ended."""
        client = self._client
        wait_s = timeout.total_seconds() if timeout is not None else timeouts().connect_s
        with client._changed:
            client._changed.wait_for(
                lambda: all(key in client._values for key in keys) or client._outcome == ENDED, wait_s
            )
            if not all(key in client._values for key in keys):
                raise RuntimeError(f"a rank's address has not arrived within {wait_s:.0f} s, or the session is over")

    def check(self, keys: list[str]) -> bool:
        """Return whether the values of all keys have arrived."""
        with self._client._changed:
            return all(key in self._client._values for key in keys)
