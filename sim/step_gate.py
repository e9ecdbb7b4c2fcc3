"""Decides which step devices may start, and when: the step's plan must be known, and the run must not end before."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.adapt.adaptation import Adaptation
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS, Decision
from planner.adapt.thinking import Thinking
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.faults import known_away, noticed_absences
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats


class StopCondition:
    """The end of a run: after a number of steps, or when a duration has passed.

    If one device has been allowed to start a step, all devices may start the step, even at a later time.

    Attributes:
        steps: Number of steps.
        duration_s: Time from which no step starts, seconds from the start of the run.
    """

    def __init__(self, steps: int, duration_s: float = math.inf) -> None:
        self.steps = steps
        self.duration_s = duration_s
        self._allowed = 0

    def allows(self, step: int, now_s: float) -> bool:
        """Return whether a device that is ready for a step at ``now_s`` seconds of the run may start it."""
        if now_s < self.duration_s:
            self._allowed = max(self._allowed, step + 1)
        return step < min(self._allowed, self.steps)


class PolicyClock:
    """Shows finished steps to the policy, and says when its answers are known: the policy takes time to think.

    Attributes:
        adaptation: Plans and decisions so far.
        known_s: When the last answer, or that there is none yet, was known, seconds of the run.
    """

    def __init__(self, adaptation: Adaptation) -> None:
        self.adaptation = adaptation
        self.known_s = 0.0
        self._thinking = Thinking(adaptation, self._begin)
        # End of the last finished step, and when the policy has answered the last call.
        self._now_s = self._free_s = 0.0

    def finish_step(self, step: int, events: Iterable[Event], away: tuple[str, ...], over_s: float) -> Decision | None:
        """Show the policy a step that was finished at ``over_s`` seconds of the run; return a decision, or None."""
        self._now_s = self.known_s = over_s
        return self._thinking.finish_step(step, events, away, over_s)

    def lose_devices(
        self,
        step: int,
        events: Sequence[Event],
        gone: tuple[str, ...],
        away: tuple[str, ...],
        resumed: int,
        now_s: float,
    ) -> Decision | None:
        """Show the policy at ``now_s`` an unfinished step that devices have left; see `Adaptation.lose_devices`."""
        self._thinking.settle()
        decision = self.adaptation.lose_devices(step, events, gone, away, resumed)
        thinking_s = self.adaptation.thinking_s
        self.known_s = self._free_s = max(self._free_s, now_s) + thinking_s if thinking_s else now_s
        return decision

    def _begin(self, seen: Observation) -> "SimulatedThought":
        proposed = self.adaptation.propose(seen)
        self._free_s = max(self._now_s, self._free_s) + self.adaptation.thinking_s
        return SimulatedThought(self, proposed, self._free_s)


@dataclass(frozen=True, slots=True)
class SimulatedThought:
    """A call of the policy that is over at ``over_s`` seconds of the run."""

    clock: PolicyClock
    proposed: Plan | None
    over_s: float

    def is_over(self, until_s: float) -> bool:
        """Return whether the policy has answered by ``until_s``."""
        self.clock.known_s = max(self.clock.known_s, min(self.over_s, until_s))
        return self.over_s <= until_s

    def answer(self) -> Plan | None:
        """Return the policy's answer."""
        return self.proposed


class StepGate:
    """Holds actors back until they may start their next step, and lets the policy observe finished steps.

    With a policy, step k may start once all devices have finished step k - ``DECISION_LAG_STEPS``, from which the
    policy decides the plan of step k. The epoch ends before the first step of a decision that begins a new epoch.

    Args:
        observed_steps: Number of steps that the policy has observed; steps before it are repeated.

    Attributes:
        end_step: Index after the last step of the epoch.
        known_steps: Index after the last step whose plan is known.
        known_s: When the plan of an unfinished step was known, seconds of the run, by step; the steps of an epoch's
            start lack it.
        next_step: First step that not every actor has finished.
        unfinished: Number of actors that have reached neither the end of the epoch nor a step after the run's end.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: PolicyClock | None,
        stop: StopCondition,
        actors: int,
        first_step: int,
        observed_steps: int = 0,
    ) -> None:
        self.adaptation = policy.adaptation if policy is not None else None
        self._policy = policy
        self.first_step = first_step
        self.end_step = stop.steps
        self._observed_steps = max(first_step, observed_steps)
        self.known_steps = self._observed_steps + DECISION_LAG_STEPS if policy is not None else stop.steps
        self.known_s: dict[int, float] = {}
        self.next_step = first_step
        self.unfinished = actors
        self._stop = stop
        self._absences = noticed_absences(scenario.faults)
        # Actors that wait for a step, by step: until its plan is known, or until another actor may start it.
        self._undecided: dict[int, list[int]] = {}
        self._disallowed: dict[int, list[int]] = {}
        self._end_before_next_epoch()

    @property
    def next_unobserved(self) -> int:
        """First step that not every actor has finished, and that the policy has not observed."""
        return max(self.next_step, self._observed_steps)

    @property
    def undecided(self) -> set[int]:
        """Actors that wait for a step's plan."""
        return {actor for actors in self._undecided.values() for actor in actors}

    def admit(self, step: int, actors: Sequence[int], clock_s: Floats) -> list[int]:
        """Return the actors that start a step now: none, or the given ones and those that waited for this step.

        The clocks of actors that are ready before the step's plan is known advance to that time.
        """
        if step in self.known_s and step < self._stop.steps:
            clock_s[actors] = np.maximum(clock_s[actors], self.known_s[step])
        if step == self.end_step:
            self.unfinished -= len(actors)
            return []
        if step >= self.known_steps:
            self._undecided.setdefault(step, []).extend(actors)
            return []
        if not self._stop.allows(step, float(clock_s[actors].min())):
            self._disallowed.setdefault(step, []).extend(actors)
            self.unfinished -= len(actors)
            return []
        held_back = self._disallowed.pop(step, [])
        self.unfinished += len(held_back)
        return [*actors, *held_back]

    def leave(self, actors: int) -> None:
        """Count a number of actors that begin no further step."""
        self.unfinished -= actors

    def finish(self, step: int, events: Iterable[Event], over_s: float) -> Decision | None:
        """Record that all actors have finished a step at ``over_s`` seconds; return the policy's decision, or None."""
        self.next_step = max(self.next_step, step + 1)
        if self._policy is None or step < self._observed_steps:
            return None
        decision = self._policy.finish_step(step, events, known_away(self._absences, over_s), over_s)
        if decision is not None:
            self._end_before_next_epoch()
        self.known_s.pop(step, None)
        self.known_s[step + DECISION_LAG_STEPS] = self._policy.known_s
        self.known_steps = step + DECISION_LAG_STEPS + 1
        return decision

    def release(self) -> list[int]:
        """Return the actors that waited for the plan of the last step whose plan is known."""
        return self._undecided.pop(self.known_steps - 1, [])

    def _end_before_next_epoch(self) -> None:
        start = self.adaptation.next_start(self.first_step) if self.adaptation is not None else None
        if start is not None:
            self.end_step = min(self.end_step, start.first_step)
