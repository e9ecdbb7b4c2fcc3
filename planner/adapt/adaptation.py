"""The adaptation loop: a policy decides which plan each step runs."""

import math
from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import replace

from planner.adapt.copies import layers_of
from planner.adapt.gradient_noise import GradientNorms, NoiseEstimate
from planner.adapt.migration import (
    NO_MIGRATION,
    Migration,
    backup_holders,
    migration_between,
    needs_set_up,
    set_up_once,
)
from planner.adapt.observation import Observation, Observer
from planner.adapt.policy import DECISION_LAG_STEPS, Decision, Policy, describe_change, measures_unused_links
from planner.adapt.worker_moves import keeps_workers, same_workers, worker_moves
from planner.check import check_plan
from planner.events.event import Event
from planner.plan.plan import Plan, samples_before
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError, RunError

# The estimator of the noise scale, a key of `planner.adapt.gradient_noise.ESTIMATORS`, by which policies see it.
NOISE_ESTIMATOR = "minimum-variance"

# Fields of a plan that must stay the same during a run, even with a new set-up.
_INVARIANT = ("scenario", "model", "version")


class Adaptation:
    """Shows finished steps to a policy, records its decisions, and returns the plan of each step.

    Both backends use this class, and a recorded run can be replayed through it.

    Args:
        plan: The plan of the first step.
        first_step: Index of the run's first step, above 0 if it resumes from a checkpoint.
        first_sample: Samples of all steps before ``first_step``.
        first_plan: The plan with which the run began, if it resumes from a checkpoint; None if that is ``plan``.
        steps: Index after the last step of the run; None if it is not known. Without it, a recorded run that is
            replayed may be decided otherwise.
        duration_s: Time from which no step starts, seconds from the start of the run.

    Attributes:
        measures_unused_links: Whether the run measures unused links for the policy.

    Raises:
        InputError: The plan's pipelines take steps at their own speed, so that no step is one of all devices.
        RunError: The policy returned a plan that fails the check, changes a field that a run keeps, names an absent
            device, or changes more than `keeps_senders` allows while pipelines train without a barrier.
    """

    def __init__(
        self,
        policy: Policy,
        plan: Plan,
        scenario: Scenario,
        first_step: int = 0,
        first_sample: int = 0,
        first_plan: Plan | None = None,
        steps: int | None = None,
        duration_s: float = math.inf,
    ) -> None:
        if plan.synchronisation.is_decoupled:
            method = plan.synchronisation.method
            raise InputError(
                f"a policy cannot steer method '{method}': its pipelines finish no step together",
                where="policy",
                valid="leave the policy out, since exchanges follow links by themselves, or choose another method",
            )
        self.measures_unused_links = measures_unused_links(policy)
        self._policy = policy
        self._observer = Observer()
        self._scenario = scenario
        # Pairs (first step, plan) in the order of decisions. After a departure, a decision overrides earlier ones whose
        # first step is later.
        self._timeline: list[tuple[int, Plan]] = [(first_step, plan)]
        self._first_sample = first_sample
        self._first_plan = first_plan or plan
        self._first_step, self._steps, self._duration_s = first_step, steps, duration_s
        self._starts: list[Decision] = []
        self.decisions: list[Decision] = []

    def plan_for(self, step: int) -> Plan:
        """Return the plan of ``step``, which is at most the last finished step plus `DECISION_LAG_STEPS`."""
        return next(plan for first_step, plan in reversed(self._timeline) if first_step <= step)

    def samples_before(self, step: int) -> int:
        """Return the samples of all steps before ``step``, whose plans must be known."""
        return self._first_sample + samples_before(step, self._timeline)

    @property
    def latest(self) -> Plan:
        """The plan of the last decision."""
        return self._timeline[-1][1]

    def is_start(self, decision: Decision) -> bool:
        """Return whether all devices are set up anew for a decision, even if no layer moves."""
        return decision in self._starts

    def next_start(self, step: int) -> Decision | None:
        """Return the next decision after ``step`` for which all devices are set up anew; None if there is none yet.

        Before the decision's ``first_step`` starts, all devices finish the previous step, and layers migrate.
        """
        return min((each for each in self._starts if each.first_step > step), key=_first_step, default=None)

    def finish_step(self, step: int, events: Iterable[Event], away: tuple[str, ...] = ()) -> Decision | None:
        """Show the policy a finished step, with its events; return the decision, or None if the policy keeps the plan.

        ``away`` names the devices of the cluster that are known to be absent. The policy answers at once; with
        `planner.adapt.thinking.Thinking` training goes on meanwhile.
        """
        seen = self.observe(step, events, away)
        proposed = self.propose(seen)
        return self.install(seen, proposed, step + DECISION_LAG_STEPS) if proposed is not None else None

    def observe(
        self, step: int, events: Iterable[Event], away: tuple[str, ...] = (), norms: GradientNorms | None = None
    ) -> Observation:
        """Return the observation of a finished step, with its events and, if they were measured, gradient norms."""
        trained = self.samples_before(step)
        seen = self._observer.observe(events, step, self.plan_for(step))
        noise = self._noise(norms, trained)
        left_s = self._left_s(step, seen.end_s)
        return replace(seen, away=away, samples_before=trained, noise=noise, first_plan=self._first_plan, left_s=left_s)

    def _left_s(self, step: int, end_s: float) -> float:
        """Return the time that the run goes on after a step, if steps take as long as they did in the mean, seconds."""
        mean_s = end_s / (step + 1 - self._first_step)
        steps_s = math.inf if self._steps is None else (self._steps - step - 1) * mean_s
        return max(0.0, min(steps_s, self._duration_s - end_s))

    def _noise(self, norms: GradientNorms | None, samples: int) -> NoiseEstimate | None:
        if norms is not None:
            return norms.estimate(NOISE_ESTIMATOR)
        limits = self._scenario.training.batch
        assumed = None if limits is None else limits.assumed_noise_scale(samples)
        # Only the ratio is assumed.
        return None if assumed is None else NoiseEstimate(variance=assumed, squared_gradient=1.0)

    def propose(self, seen: Observation) -> Plan | None:
        """Show an observation to the policy; return the plan that it wants, or None if it keeps the plan."""
        current = self.latest
        proposed = self._policy.decide(seen, current)
        if proposed is None or proposed == current:
            return None
        when = self._when(seen)
        self._check(when, current, proposed)
        self._refuse_away(when, proposed, set(seen.away) - set(current.devices))
        return proposed

    def install(self, seen: Observation, proposed: Plan, first_step: int) -> Decision:
        """Change to the plan that `propose` returned for an observation, from ``first_step`` on."""
        current = self.latest
        anew = needs_set_up(current, proposed)
        migration = self._migration(self._when(seen), current, proposed, seen.away) if anew else NO_MIGRATION
        decision = self._decide(seen.step, first_step, current, proposed, migration)
        if anew:
            self._starts.append(decision)
        return decision

    def restore(self, decision: Decision) -> None:
        """Go on after a decision of an earlier process, which followed the run before this one, with another policy."""
        if needs_set_up(self.latest, decision.plan):
            self._starts.append(decision)
        self._timeline.append((decision.first_step, decision.plan))
        self.decisions.append(decision)

    @property
    def thinking_s(self) -> float:
        """Seconds that the policy's last call is estimated to take on a usual machine; 0 for policies without it."""
        return float(getattr(self._policy, "thinking_s", 0.0))

    def _when(self, seen: Observation) -> str:
        return f"after step {seen.step} policy {self._name}"

    def lose_devices(
        self,
        step: int,
        events: Iterable[Event],
        gone: tuple[str, ...],
        away: tuple[str, ...],
        resumed: int | None = None,
    ) -> Decision | None:
        """Show the policy an unfinished step, with its events so far, that devices have left.

        Args:
            step: Index of the first step that not every device had finished.
            events: Events of the step so far.
            gone: Absent devices that the plan of the step names.
            away: All absent devices of the cluster.
            resumed: The step from which the run goes on if finished steps have to be repeated; None if not.

        Returns:
            The decision to continue without the devices in ``gone``; None to wait for their return.
        """
        running = self.plan_for(step)
        # With a copy: if the policy waits, the step goes on, and is observed again when it is finished.
        observed = deepcopy(self._observer).observe(events, step, running)
        trained = self.samples_before(step)
        noise = self._noise(None, trained)
        seen = replace(observed, gone=gone, away=away, samples_before=trained, noise=noise, first_plan=self._first_plan)
        # A plan that is already decided for a later step may not contain the devices that left.
        current = self.latest if set(gone) & set(self.latest.devices) else running
        proposed = self._policy.decide(seen, current)
        if proposed is None:
            return None
        when = f"when {', '.join(gone)} had left step {step}, policy {self._name}"
        self._refuse_away(when, proposed, seen.missing)
        self._check(when, running, proposed)
        self._starts = [each for each in self._starts if each.first_step < step]
        decision = self._decide(step, step, running, proposed, self._migration(when, running, proposed, away))
        if resumed is not None and resumed < step:
            self._timeline.append((resumed, proposed))
        return decision

    @property
    def _name(self) -> str:
        return str(getattr(self._policy, "name", type(self._policy).__name__))

    def _decide(self, step: int, first_step: int, old: Plan, new: Plan, migration: Migration) -> Decision:
        decision = Decision(step, first_step, new, describe_change(old, new, migration), migration)
        self._timeline.append((first_step, new))
        self.decisions.append(decision)
        return decision

    def _check(self, when: str, current: Plan, proposed: Plan) -> None:
        try:
            check_plan(proposed, self._scenario)
        except InputError as error:
            raise RunError(f"{when} returned a plan that is not valid: {error}") from error
        waits = current.synchronisation.method == "allreduce"
        if not waits and needs_set_up(current, proposed) and not keeps_senders(current, proposed):
            raise RunError(
                f"{when} moves layers or the first replica of a stage, or changes what is set up once, while pipelines "
                "train without a barrier: only other replicas, and with outer steps whole pipelines, can come and go "
                "then; all else needs method 'allreduce'"
            )
        changes = [(name, getattr(current, name), getattr(proposed, name)) for name in _INVARIANT]
        methods = (current.synchronisation.method, proposed.synchronisation.method)
        for name, before, after in [*changes, ("synchronisation.method", *methods)]:
            if before != after:
                raise RunError(f"{when} changes '{name}' from {before!r} to {after!r}, which a running job keeps")

    def _refuse_away(self, when: str, proposed: Plan, away: Collection[str]) -> None:
        named = [device for device in proposed.devices if device in away]
        if named:
            raise RunError(
                f"{when} returned a plan with {', '.join(named)}, which {'is' if len(named) == 1 else 'are'} away: a "
                "plan names only devices that are there"
            )

    def _migration(self, when: str, old: Plan, new: Plan, away: tuple[str, ...]) -> Migration:
        lost = set(away) & set(old.devices)
        try:
            if new.synchronisation.has_outer_step:
                held = {device: layers_of(old, device) for device in old.devices if device not in lost}
                return worker_moves(held, old, new, self._scenario)
            return migration_between(old, new, self._scenario, lost, backup_holders(old) if lost else None)
        except InputError as error:
            raise RunError(f"{when} returned a plan that cannot be reached: {error}") from error


def keeps_senders(old: Plan, new: Plan) -> bool:
    """Return whether a change of plan keeps layers and first replica of each stage, and all that is set up once.

    The first replicas exchange the updates of pipelines that train without a barrier. If they stay, the other replicas
    can change between two steps of their own pipeline: a new one gets the state of the first one, and the other
    pipelines go on meanwhile. The interval between exchanges may change too, with the bound on the staleness, and all
    settings of outer steps; but not where pipelines take steps at their own speed. With outer steps whole pipelines may
    come and go.
    """
    before, after = old.synchronisation, new.synchronisation
    if not before.is_decoupled:
        bound = before.staleness_bound if after.interval_steps == before.interval_steps else after.staleness_bound
        changed = replace(before, interval_steps=after.interval_steps, staleness_bound=bound, outer=after.outer)
        old = replace(old, synchronisation=changed)
    kept = all(getattr(old, name) == getattr(new, name) for name in set_up_once())
    stay = keeps_workers if before.has_common_outer_step else same_workers
    return kept and stay(old, new)


def _first_step(decision: Decision) -> int:
    return decision.first_step
