"""Copies of messages between GPU and host beside compute: an engine each way, each with a thread of its own.

gloo carries messages from host to host. Real runs copy them on CUDA streams of their own, to and from page-locked
memory; paced runs sleep, as the simulator counts the copies (`planner.cost.device_transport`). Each engine makes one
copy after the other: outwards in the order in which actions send, inwards in the order in which actions need the
messages or, where the order of actions is dynamic, in which they arrive.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from executor.core.clock import RunClock
from executor.core.step_program import Transfer
from executor.transport.receive import RecvHandle
from planner.cost.device_transport import GLOO, boundary_transport, copy_seconds_per_byte
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

# A payload, and the run second from which on it can be used.
Ready = tuple[torch.Tensor, float]


class Copies:
    """The copies of one rank: none, where it computes on the CPU, or in a paced run whose copies take no time.

    Each method that copies is called by one thread only.
    """

    def leave(self, plan: Plan, transfer: Transfer) -> bool:
        """Return whether a message that this rank sends is copied to its host."""
        return False

    def enter(self, plan: Plan, transfer: Transfer) -> bool:
        """Return whether a message that this rank receives is copied from its host."""
        return False

    def prepare(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return the function that copies a payload to the host; called where the payload was computed."""
        return lambda: payload

    def out(self, plan: Plan, transfer: Transfer, copy: Callable[[], torch.Tensor], ready_s: float) -> Ready:
        """Copy what was ready at run second ``ready_s`` to the host; return when it is there."""
        return copy(), ready_s

    def into(self, plan: Plan, transfer: Transfer, payload: torch.Tensor, ready_s: float) -> Ready:
        """Copy what has arrived at run second ``ready_s`` from the host; return when it is there."""
        return payload, ready_s

    def adopt(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a received payload for use in the calling thread."""
        return payload


class PacedCopies(Copies):
    """Sleeps for the time of each copy by the scenario's rates."""

    def __init__(self, scenario: Scenario, clock: RunClock) -> None:
        self._scenario = scenario
        self._clock = clock
        self._left_s = self._entered_s = 0.0

    def _seconds(self, plan: Plan, transfer: Transfer) -> tuple[float, float]:
        each_s = copy_seconds_per_byte(plan, self._scenario, transfer.source, transfer.target)
        return transfer.size_bytes * each_s[0], transfer.size_bytes * each_s[1]

    def leave(self, plan: Plan, transfer: Transfer) -> bool:
        """Return whether the copy to the host takes time."""
        return self._seconds(plan, transfer)[0] > 0

    def enter(self, plan: Plan, transfer: Transfer) -> bool:
        """Return whether the copy from the host takes time."""
        return self._seconds(plan, transfer)[1] > 0

    def out(self, plan: Plan, transfer: Transfer, copy: Callable[[], torch.Tensor], ready_s: float) -> Ready:
        """Sleep until the copy to the host would end."""
        self._left_s = max(ready_s, self._left_s) + self._seconds(plan, transfer)[0]
        self._clock.sleep_until(self._left_s)
        return copy(), self._left_s

    def into(self, plan: Plan, transfer: Transfer, payload: torch.Tensor, ready_s: float) -> Ready:
        """Sleep until the copy from the host would end."""
        self._entered_s = max(ready_s, self._entered_s) + self._seconds(plan, transfer)[1]
        self._clock.sleep_until(self._entered_s)
        return payload, self._entered_s


class CudaCopies(Copies):
    """Copies between a GPU and page-locked memory of its host, on a stream for each way.

    Args:
        uses_nccl: Whether NCCL carries messages where `planner.cost.device_transport` says so; otherwise gloo does.
        enters: Whether received messages are used on the GPU; not by a tensor-parallel group that gloo connects, whose
            first rank sends them on to the others.
    """

    def __init__(
        self, scenario: Scenario, device: torch.device, clock: RunClock, *, uses_nccl: bool, enters: bool
    ) -> None:
        self._scenario = scenario
        self._device = device
        self._clock = clock
        self._uses_nccl = uses_nccl
        self._enters = enters
        self._outwards, self._inwards = new_stream(device), new_stream(device)

    def _is_staged(self, plan: Plan, transfer: Transfer) -> bool:
        by_plan = boundary_transport(plan, self._scenario, transfer.source, transfer.target)
        return by_plan == GLOO or not self._uses_nccl

    def leave(self, plan: Plan, transfer: Transfer) -> bool:
        """Return whether gloo carries the message."""
        return self._is_staged(plan, transfer)

    def enter(self, plan: Plan, transfer: Transfer) -> bool:
        """Return whether gloo carries the message, and it is used on the GPU."""
        return self._enters and self._is_staged(plan, transfer)

    def prepare(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return the function that copies a payload to the host when the calling thread's stream has computed it."""
        computed = torch.cuda.current_stream(self._device).record_event()

        def copy() -> torch.Tensor:
            with torch.cuda.stream(self._outwards):
                self._outwards.wait_event(computed)
                # Torch keeps page-locked memory for the next payload.
                host = torch.empty(payload.numel(), dtype=torch.uint8, pin_memory=True)
                host.copy_(payload, non_blocking=True)
                # Until here this function holds the payload, so that its memory is not used again.
                self._outwards.synchronize()
            return host

        return copy

    def out(self, plan: Plan, transfer: Transfer, copy: Callable[[], torch.Tensor], ready_s: float) -> Ready:
        """Copy to the host, and wait for it."""
        return copy(), self._clock.now_s()

    def into(self, plan: Plan, transfer: Transfer, payload: torch.Tensor, ready_s: float) -> Ready:
        """Copy from the host, and wait for it."""
        with torch.cuda.stream(self._inwards):
            copied = payload.to(self._device, non_blocking=True)
            self._inwards.synchronize()
        return copied, self._clock.now_s()

    def adopt(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a received payload for the calling thread's stream: its memory stays until that stream has used it."""
        if payload.is_cuda:
            payload.record_stream(torch.cuda.current_stream(self._device))
        return payload


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream, which does not wait for the device's default stream."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@dataclass(eq=False)
class Staging:
    """Passes messages through the copy engines of this rank, if they need them.

    Args:
        failed: Called with an error that ends a copy to the host, in another thread.
    """

    copies: Copies
    _failed: Callable[[Exception], None]

    def __post_init__(self) -> None:
        # Threads start with the first copy.
        self._outwards = ThreadPoolExecutor(1, "copy-out")
        self._inwards = ThreadPoolExecutor(1, "copy-in")

    def send(
        self,
        plan: Plan,
        transfer: Transfer,
        payload: torch.Tensor,
        ready_s: float,
        deliver: Callable[[torch.Tensor, float], None],
    ) -> None:
        """Call ``deliver`` with the payload and the run second at which it is ready: at once, or after its copy."""
        if not self.copies.leave(plan, transfer):
            deliver(payload, ready_s)
            return
        copy = self.copies.prepare(payload)
        sent = self._outwards.submit(lambda: deliver(*self.copies.out(plan, transfer, copy, ready_s)))
        sent.add_done_callback(self._report)

    def receive(
        self,
        plan: Plan,
        transfer: Transfer,
        post: Callable[[Callable[[RecvHandle], None] | None], RecvHandle],
        arrived: Callable[[RecvHandle], None] | None,
    ) -> tuple[RecvHandle, Callable[[], Ready]]:
        """Post a receive by ``post``, and return its handle and the function that waits for the message's payload.

        Args:
            plan: The plan of the step.
            transfer: The message that the receive is for.
            post: Posts the receive, and gets what to call with the handle on arrival.
            arrived: What the order of actions wants to be called with when the message can be used; None for an order
                that does not ask.
        """
        if not self.copies.enter(plan, transfer):
            handle = post(arrived)
            return handle, lambda: (handle.wait(), handle.arrived_s)

        def copy(handle: RecvHandle) -> Ready:
            return self.copies.into(plan, transfer, handle.wait(), handle.arrived_s)

        if arrived is None:
            handle = post(None)
            return handle, self._inwards.submit(copy, handle).result
        copied: Future[Ready] = Future()

        def copy_and_tell(handle: RecvHandle) -> None:
            try:
                copied.set_result(copy(handle))
            except Exception as error:
                copied.set_exception(error)
            arrived(handle)

        return post(lambda handle: self._tell(copy_and_tell, handle)), copied.result

    def close(self, *, wait: bool = True) -> None:
        """End the threads, after all copies to the host or, without ``wait``, when they can."""
        self._outwards.shutdown(wait)
        self._inwards.shutdown(wait)

    def _tell(self, copy_and_tell: Callable[[RecvHandle], None], handle: RecvHandle) -> None:
        self._inwards.submit(copy_and_tell, handle)

    def _report(self, done: Future[None]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            self._failed(error)
