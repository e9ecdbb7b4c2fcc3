"""Lets a policy think beside the training: a decision that takes long takes effect later, and no device waits for it.

A policy observes one finished step after the other. While it thinks about one, the following steps keep the last plan,
and their observations wait. Both backends use this class; they differ in what makes a policy's answer late: the clock
of a real run, or in the simulator the time that the policy is estimated to take (`Adaptation.thinking_s`).
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from planner.adapt.adaptation import Adaptation
from planner.adapt.gradient_noise import GradientNorms
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS, Decision
from planner.events.event import Event
from planner.plan.plan import Plan

# Longest time for which the next step without a plan waits for the policy, seconds after the end of a step.
LONGEST_WAIT_S = 0.1


class Thought(Protocol):
    """A call of the policy, which may still go on."""

    def is_over(self, until_s: float) -> bool:
        """Wait for the policy's answer until ``until_s``, in seconds of the run's clock; return whether it is there."""

    def answer(self) -> Plan | None:
        """Return the policy's answer: the plan to change to, or None to keep the plan; wait for it if need be."""


class Thinking:
    """Shows finished steps to a policy, one after the other, and decides by its answers.

    Args:
        begin: Calls the policy with an observation (`Adaptation.propose`).
    """

    def __init__(self, adaptation: Adaptation, begin: Callable[[Observation], Thought]) -> None:
        self._adaptation = adaptation
        self._begin = begin
        self._unseen: deque[Observation] = deque()
        self._current: tuple[Observation, Thought] | None = None

    def finish_step(
        self,
        step: int,
        events: Iterable[Event],
        away: tuple[str, ...],
        now_s: float,
        norms: GradientNorms | None = None,
    ) -> Decision | None:
        """Show the policy a finished step; return a decision, which can answer an earlier step, or None.

        Step, events, ``away`` and norms are those of `Adaptation.observe`; ``now_s`` is the time of the run's clock.
        The decision's first step is the first one whose plan the devices do not know yet. An answer is dropped if it
        names a device that has left meanwhile.
        """
        self._unseen.append(self._adaptation.observe(step, events, away, norms))
        until_s = now_s
        while self._current is not None or self._unseen:
            if self._current is None:
                seen = self._unseen.popleft()
                self._current = seen, self._begin(seen)
                until_s = now_s + LONGEST_WAIT_S
            seen, thought = self._current
            if not thought.is_over(until_s):
                return None
            self._current = None
            proposed = thought.answer()
            left = set(away) - set(self._adaptation.latest.devices)
            if proposed is not None and left.isdisjoint(proposed.devices):
                return self._adaptation.install(seen, proposed, step + DECISION_LAG_STEPS)
        return None

    def end(self) -> None:
        """Wait for the policy at the end of a run, and show it the observations that wait; its answers are dropped."""
        if self._current is not None:
            self._current[1].answer()
        while self._unseen:
            self._begin(self._unseen.popleft()).answer()

    def settle(self) -> None:
        """Wait for the policy if it thinks, and drop its answer and all observations that wait: devices were lost."""
        if self._current is not None:
            self._current[1].answer()
        self._current = None
        self._unseen.clear()
