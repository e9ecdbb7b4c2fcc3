"""Sums gradients in a thread of its own while its rank computes: each sum as soon as its gradients are complete."""

import threading

from executor.core.clock import RunClock
from executor.core.step_program import StepProgram
from executor.runtime.gradient_exchange import GradientExchange
from executor.runtime.posted_receives import PostedStep


class OverlappedAllReduce:
    """The sums of one step, one after the other.

    Args:
        exchange: Carries them out.
        clock: Of the run.
        current: The step.
        posted: Its receives.
    """

    def __init__(self, exchange: GradientExchange, clock: RunClock, current: StepProgram, posted: PostedStep) -> None:
        self._exchange = exchange
        self._clock = clock
        self._current = current
        self._posted = posted
        program = current.program
        during = {each.sync for work in program.work for each in work.completes}
        self._complete = [threading.Event() for _ in program.synchronisations]
        for sync, complete in enumerate(self._complete):
            if sync not in during:
                complete.set()
        self._error: Exception | None = None
        self._done_s = float("-inf")
        # If its rank fails, nobody will tell it that anything is complete.
        self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
        self._thread.start()

    def complete(self, sync: int) -> None:
        """Let a sum begin."""
        self._complete[sync].set()

    def finish(self) -> float:
        """Wait for all sums; return the run second at which they were done.

        Raises:
            PeerLostError: One of the others is gone.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._done_s

    def _run(self) -> None:
        try:
            for sync, complete in zip(self._current.program.synchronisations, self._complete, strict=True):
                complete.wait()
                self._exchange.synchronise(self._current, sync, self._posted)
            self._done_s = self._clock.now_s()
        except Exception as error:
            self._error = error
