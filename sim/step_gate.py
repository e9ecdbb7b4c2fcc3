"""Decides which step devices may start: the step's plan must be known, and the run must not end before it."""

import math
from collections.abc import Iterable, Sequence

from planner.adapt.adaptation import Adaptation
from planner.adapt.policy import DECISION_LAG_STEPS, Decision
from planner.events.event import Event
from planner.scenario.faults import known_away, noticed_absences
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats


class StopCondition:
    """The end of a run: after a number of steps, or when a duration has passed.

    If one device has been allowed to start a step, all devices may start the step, even at a later time.

    Args:
        duration_s: Time from which no step starts, seconds from the start of the run.
    """

    def __init__(self, steps: int, duration_s: float = math.inf) -> None:
        self.steps = steps
        self._duration_s = duration_s
        self._allowed = 0

    def allows(self, step: int, now_s: float) -> bool:
        """Return whether a device that is ready for a step at ``now_s`` seconds of the run may start it."""
        if now_s < self._duration_s:
            self._allowed = max(self._allowed, step + 1)
        return step < min(self._allowed, self.steps)


class StepGate:
    """Holds actors back until they may start their next step, and lets the policy observe finished steps.

    With a policy, step k may start once all devices have finished step k - ``DECISION_LAG_STEPS``, from which the
    policy decides the plan of step k. The epoch ends before the first step of a decision that begins a new epoch.

    Attributes:
        end_step: Index after the last step of the epoch.
        known_steps: Index after the last step whose plan is known.
        next_step: First step that not every actor has finished.
        unfinished: Number of actors that have reached neither the end of the epoch nor a step after the run's end.
    """

    def __init__(
        self, scenario: Scenario, adaptation: Adaptation | None, stop: StopCondition, actors: int, first_step: int
    ) -> None:
        self.adaptation = adaptation
        self.first_step = first_step
        self.end_step = stop.steps
        self.known_steps = first_step + DECISION_LAG_STEPS if adaptation is not None else stop.steps
        self.next_step = first_step
        self.unfinished = actors
        self._stop = stop
        self._absences = noticed_absences(scenario.faults)
        # Actors that wait for a step, by step: until its plan is known, or until another actor may start it.
        self._undecided: dict[int, list[int]] = {}
        self._disallowed: dict[int, list[int]] = {}
        self._end_before_next_epoch()

    @property
    def undecided(self) -> set[int]:
        """Actors that wait for a step's plan."""
        return {actor for actors in self._undecided.values() for actor in actors}

    def admit(self, step: int, actors: Sequence[int], clock_s: Floats) -> list[int]:
        """Return the actors that start a step now: none, or the given ones and those that waited for this step."""
        if step == self.end_step:
            self.unfinished -= len(actors)
        elif step >= self.known_steps:
            self._undecided.setdefault(step, []).extend(actors)
        elif not self._stop.allows(step, float(clock_s[actors].min())):
            self._disallowed.setdefault(step, []).extend(actors)
            self.unfinished -= len(actors)
        else:
            held_back = self._disallowed.pop(step, [])
            self.unfinished += len(held_back)
            return [*actors, *held_back]
        return []

    def finish(self, step: int, events: Iterable[Event], over_s: float) -> Decision | None:
        """Record that all actors have finished a step at ``over_s`` seconds; return the policy's decision, or None."""
        self.next_step = max(self.next_step, step + 1)
        if self.adaptation is None:
            return None
        decision = self.adaptation.finish_step(step, events, known_away(self._absences, over_s))
        if decision is not None:
            self._end_before_next_epoch()
        self.known_steps = step + DECISION_LAG_STEPS + 1
        return decision

    def release(self) -> list[int]:
        """Return the actors that waited for the plan of the last step whose plan is known."""
        return self._undecided.pop(self.known_steps - 1, [])

    def _end_before_next_epoch(self) -> None:
        start = self.adaptation.next_start(self.first_step) if self.adaptation is not None else None
        if start is not None:
            self.end_step = min(self.end_step, start.first_step)
