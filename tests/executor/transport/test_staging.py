"""Copy engines of paced runs: one copy at a time, beside compute, as in the simulator."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import cast

import pytest
import torch

from executor.backend import TorchBackend
from executor.core.clock import RunClock
from executor.core.step_program import Transfer
from executor.transport.receive import RecvHandle
from executor.transport.staging import PacedCopies, Staging
from planner.events.event import Event, EventKind
from planner.plan.actions import Kind
from planner.plan.plan import Plan
from planner.scenario.effects import Effects, TransportEffects
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario

SIZE_BYTES = 1000
COPY_S = 0.02


def case(copy_s: float = COPY_S, order: str = "scheduled") -> tuple[Scenario, Plan]:
    """Two stages, whose forwards take 10 ms; every message is copied for ``copy_s`` at each end."""
    scenario = chain_scenario([0.01, 0.01], [0.0, 0.0], output_bytes=[SIZE_BYTES, 0], global_batch=4)
    transport = TransportEffects(copies=True, copy_bps=8 * SIZE_BYTES / copy_s)
    return replace(scenario, effects=Effects(transport=transport)), replace(
        chain_plan(scenario, schedule="gpipe", depths=[4, 4]), order=order
    )


def transfer(microbatch: int) -> Transfer:
    return Transfer("device-0", "device-1", Kind.FORWARD, 0, 1, microbatch, 0, 1, SIZE_BYTES)


class Arrival:
    """A receive that completes when it is told so."""

    def __init__(self) -> None:
        self._message: Future[torch.Tensor] = Future()
        self.arrived_s = 0.0

    def wait(self) -> torch.Tensor:
        return self._message.result()

    def arrive(self, time_s: float) -> None:
        self.arrived_s = time_s
        self._message.set_result(torch.zeros(SIZE_BYTES, dtype=torch.uint8))

    def fail(self) -> None:
        self._message.set_exception(RuntimeError("lost"))


def test_messages_leave_one_after_the_other_and_the_caller_does_not_wait() -> None:
    scenario, plan = case()
    clock, failures, left = RunClock(0.0), list[Exception](), list[float]()
    clock.start(clock.now_s() if clock.has_started else 0.0)
    staging = Staging(PacedCopies(scenario, clock), failures.append)
    ready_s = clock.now_s()
    payload = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    for microbatch in range(3):
        staging.send(plan, transfer(microbatch), payload, ready_s, lambda _, done_s: left.append(done_s - ready_s))
    # Three copies take long; the first may be done if this process had no processor meanwhile.
    assert len(left) < 3
    staging.close()
    assert left == pytest.approx([COPY_S, 2 * COPY_S, 3 * COPY_S])

    def fail(payload: torch.Tensor, done_s: float) -> None:
        raise ValueError("no connection")

    staging = Staging(PacedCopies(scenario, clock), failures.append)
    staging.send(plan, transfer(0), payload, ready_s, fail)
    staging.close()
    assert [str(each) for each in failures] == ["no connection"]


def test_messages_enter_in_the_order_of_actions_or_of_arrival() -> None:
    scenario, plan = case()
    clock = RunClock(0.0)
    for dynamic in (False, True):
        staging = Staging(PacedCopies(scenario, clock), lambda error: None)
        arrivals, takes, told = [Arrival(), Arrival()], [], list[int]()
        callbacks = []
        seen = threading.Semaphore(0)

        def arrived(number: int, told: list[int] = told, seen: threading.Semaphore = seen) -> None:
            told.append(number)
            seen.release()

        for number, arrival in enumerate(arrivals):
            handle = cast(RecvHandle, arrival)

            def post(callback, handle=handle, callbacks=callbacks):  # type: ignore[no-untyped-def]
                callbacks.append(callback)
                return handle

            tell = (lambda handle, number=number: arrived(number)) if dynamic else None
            _, take = staging.receive(plan, transfer(number), post, tell)
            takes.append(take)
        now_s = clock.now_s()
        # The second one arrives first.
        arrivals[1].arrive(now_s)
        if dynamic:
            callbacks[1](arrivals[1])
            seen.acquire()
        arrivals[0].arrive(now_s + 0.5 * COPY_S)
        if dynamic:
            callbacks[0](arrivals[0])
        ends_s = [take()[1] - now_s for take in takes]
        expected_s = [2 * COPY_S, COPY_S] if dynamic else [1.5 * COPY_S, 2.5 * COPY_S]
        assert ends_s == pytest.approx(expected_s)
        staging.close()
        assert told == ([1, 0] if dynamic else [])


def test_a_lost_sender_is_raised_where_the_message_is_needed() -> None:
    scenario, plan = case()
    staging, arrival = Staging(PacedCopies(scenario, RunClock(0.0)), lambda error: None), Arrival()
    _, take = staging.receive(plan, transfer(0), lambda callback: cast(RecvHandle, arrival), None)
    arrival.fail()
    with pytest.raises(RuntimeError, match="lost"):
        take()
    staging.close()


def rows(events: list[Event]) -> list[tuple[str, ...]]:
    return sorted(
        (str(event.kind), event.device, event.peer, event.action, str(event.microbatch), str(event.size_bytes))
        for event in events
        if event.kind in (EventKind.COMPUTE, EventKind.SEND)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "step_s"),
    [
        # Four messages leave and enter one after the other, forwards and then backwards.
        ("scheduled", 2 * (0.01 + 0.3 + 3 * 0.3 + 0.3)),
        # Each backward follows its forward, so that gradients pass beside the activations.
        ("dynamic", 0.01 + 0.3 + 3 * 0.3 + 0.3 + 0.01 + 2 * 0.3),
    ],
)
def test_a_paced_run_lasts_as_long_as_the_simulation_and_no_shorter(order: str, step_s: float) -> None:
    scenario, plan = case(0.3, order)
    simulated = Simulator().run(scenario, plan, None, 2)
    paced = TorchBackend("paced").run(scenario, plan, None, 2)
    assert rows(list(paced.events)) == rows(list(simulated.events))
    lasts_s = [max(e.end_s for e in run.events if e.kind is EventKind.COMPUTE) for run in (simulated, paced)]
    assert lasts_s[0] == pytest.approx(2 * step_s, abs=1e-3)
    # On a busy machine messages are late.
    assert lasts_s[0] - 0.01 <= lasts_s[1] <= lasts_s[0] + 1.0
