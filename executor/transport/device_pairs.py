"""Messages between the GPUs of two ranks through NCCL, which needs no copies to the hosts.

An NCCL kernel waits on its GPU until the other rank's kernel runs, and any call of CUDA may wait for all kernels of its
GPU: two ranks whose kernels wait for different partners can block each other for ever (NCCL's documentation, "Using
multiple NCCL communicators concurrently"). Therefore a rank takes part in one message at a time, and begins only when
the other rank is ready too:

1. The sender tells the receiver by gloo that the message is ready. The receiver has posted the receive of this notice.
2. The rank with the smaller number takes its own turn, waits until no other message occupies it, and tells the other
   rank by gloo to go on. That rank then waits until it is free as well. Since ranks are occupied in rising order, no
   ranks wait for each other in a cycle.
3. Both start their kernels, which need nothing else. They wait for the kernels, and are free again.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.failures import blaming
from executor.transport.receive import RECV_TIMEOUT
from executor.transport.staging import new_stream
from executor.transport.wire_format import answer_tag
from planner.check.paths import nccl_pairs
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

# A notice is one whole number of 64 bits.
NOTICE_BYTES = 8


@dataclass(eq=False)
class DevicePair:
    """The way between the GPU of this rank and that of another one, in both directions.

    Args:
        peer: Name of the other device.
        rank: The number of this rank in the session.
        peer_rank: The number of the other one.
        pair: Process group of the two ranks, used for nothing else: with NCCL for payloads, and gloo for answers.
        notices: Process group of gloo, for the notices.
        occupied: Held while a message occupies this rank: one lock for all its pairs.
        device: The device of this rank's payloads.
        failed: Called with an error that ends a send, in another thread.
    """

    _peer: str
    _rank: int
    _peer_rank: int
    _pair: dist.ProcessGroup
    _notices: dist.ProcessGroup
    _occupied: threading.Lock
    _device: torch.device
    _clock: RunClock
    _failed: Callable[[Exception], None]
    _turns: int = 0
    _turn: int = 0
    _in_turn: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._sending = ThreadPoolExecutor(1, "send")
        self._stream = new_stream(self._device) if self._device.type == "cuda" else None

    def send(self, tag: int, payload: torch.Tensor, departed: Callable[[float], None]) -> None:
        """Queue a payload, whose computation has ended, and return at once; ``departed`` gets the end of the send."""
        self._sending.submit(self._send, tag, payload, departed).add_done_callback(self._report)

    def receive(self, tag: int, size_bytes: int) -> torch.Tensor:
        """Return a message whose notice has arrived.

        The tensor belongs to a stream of its own: whoever uses it on another one calls its ``record_stream``.
        """
        with blaming(self._peer), self._on_stream():
            payload = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            self._carry(tag, self._peer_rank, partial(dist.irecv, payload, self._peer_rank, group=self._pair))
        return payload

    def close(self, *, wait: bool = True) -> None:
        """End the thread that sends, after all sends or, without ``wait``, when it can."""
        self._sending.shutdown(wait)

    def _send(self, tag: int, payload: torch.Tensor, departed: Callable[[float], None]) -> None:
        with blaming(self._peer), self._on_stream():
            self._tell(self._notices, tag, 0)
            self._carry(tag, self._rank, partial(dist.isend, payload, self._peer_rank, group=self._pair))
        departed(self._clock.now_s())

    def _carry(self, tag: int, source: int, start: Callable[[], dist.Work | None]) -> None:
        """Pass a message of the rank ``source``, for which both ranks are ready."""
        answer = answer_tag(tag, from_first=source == min(self._rank, self._peer_rank))
        if self._rank < self._peer_rank:
            with self._occupied:
                self._tell(self._pair, answer, self._turns)
                self._turns += 1
                self._exchange(start)
        else:
            with self._taking_turn(self._ask(answer)), self._occupied:
                self._exchange(start)

    def _exchange(self, start: Callable[[], dist.Work | None]) -> None:
        work = start()
        assert work is not None
        # With NCCL, only the stream waits here.
        work.wait()
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def _taking_turn(self, turn: int) -> Iterator[None]:
        """Wait until all earlier messages of the pair have passed, since several threads receive answers."""
        with self._in_turn:
            self._in_turn.wait_for(lambda: self._turn == turn)
        yield
        with self._in_turn:
            self._turn += 1
            self._in_turn.notify_all()

    def _tell(self, group: dist.ProcessGroup, tag: int, number: int) -> None:
        notice = torch.tensor([number]).view(torch.uint8)
        work = dist.isend(notice, self._peer_rank, group=group, tag=tag)
        assert work is not None
        work.wait(RECV_TIMEOUT)

    def _ask(self, tag: int) -> int:
        notice = torch.empty(NOTICE_BYTES, dtype=torch.uint8)
        work = dist.irecv(notice, self._peer_rank, group=self._pair, tag=tag)
        assert work is not None
        work.wait(RECV_TIMEOUT)
        return int(notice.view(torch.int64))

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _report(self, done: Future[None]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            self._failed(error)


def check_nccl(plan: Plan, scenario: Scenario, device: str, *, is_available: bool) -> None:
    """Raise `InputError` if NCCL carries messages of a device of a plan, but this torch is built without it."""
    pair = next((pair for pair in nccl_pairs(plan, scenario) if device in pair), None)
    if pair is not None and not is_available:
        raise InputError(
            f"NCCL carries messages between devices '{pair[0]}' and '{pair[1]}', but torch has no NCCL here",
            where="--compute real",
            valid="install a torch with NCCL, or write 'effects: {transport: {nccl: false}}' into the scenario",
        )
