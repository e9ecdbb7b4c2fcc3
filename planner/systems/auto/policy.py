"""Policy ``auto``: forecasts links, keeps a portfolio of plans, and changes to the plan that saves most time.

Every step adds a sample to the forecast of each link that it used (`planner.systems.auto.forecasting.forecast`). Every
`REVIEW_EVERY_S` seconds, and at once when a link has changed, the policy predicts the step times of all plans of the
portfolio (`planner.systems.auto.portfolio`) at the forecast rates. It searches for a new plan only at link rates that
no earlier search has used.

A change that moves no layers (other depths, microbatches, orders or another format of messages) costs nothing, and is
made if it saves `LEAST_GAIN` and, if the plan has never run, as much as such plans were slower than predicted in this
run, but at most `LEAST_GAIN_OF_NEW`. A change that moves layers must save `LEAST_GAIN_OF_MOVE` or `LEAST_GAIN_OF_NEW`,
and fulfil two more conditions, which limit the loss by wrong predictions:

- The time that it saves in the expected rest of the regime is at least `SAFETY` times the time of the move.
- The time that it would have saved since the regime began is at least the time of the move.

No move is made if the budget of regret (`planner.adapt.regret`) cannot pay it and the way back to the first plan of
the run. When what is left only just pays that way, the policy takes it, if that costs less than to stay.

A regime is the time between two changes of a link's mean rate, and ends with the run. Links that the plan does not use
are probed (`planner.systems.auto.forecasting.probing`), for a limited share of the run. The method and all thresholds
are our own.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from planner.adapt.migration import time_to_reach_s
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS, Coverage
from planner.adapt.regret import RegretBudget
from planner.plan.plan import EXPLICIT, Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.auto.forecasting.forecast import LinkSample
from planner.systems.auto.forecasting.predictions import Predictions
from planner.systems.auto.forecasting.probing import LEAST_PROBE_STEPS, PROBE_ODDS, Probes, probing_plan
from planner.systems.auto.portfolio import Portfolio, Searched, searched

# Seconds between two reviews of the portfolio.
REVIEW_EVERY_S = 20.0

# Shares of a step's time that a change must save: if no layers move; if layers move and the new plan has run before;
# and if layers move and it has not, since its predicted time may be wrong by as much (docs/adaptation.md).
LEAST_GAIN, LEAST_GAIN_OF_MOVE, LEAST_GAIN_OF_NEW = 0.02, 0.05, 0.10

# Share of a step's time by which the step may get longer if its messages are rounded less. It is below `LEAST_GAIN`, so
# that the format of messages does not change to and fro.
LEAST_ROUNDED = 0.005

# Least ratio of the time that moving layers is expected to save to the time that the move takes.
SAFETY = 2.0


class AutoPolicy:
    """The policy ``auto``; each run needs an object of its own.

    Args:
        search: Function that searches for a plan; `portfolio.searched_once` if several runs need the same plans.

    Attributes:
        portfolio: Plans found so far.
        thinking_s: Estimated time of the last decision on a usual machine, seconds.
        coverage: How many steps took a time within the interval that was forecast one step before.
    """

    measures_unused_links = True

    def __init__(self, scenario: Scenario, search: Searched = searched) -> None:
        self._scenario = scenario
        self.thinking_s = 0.0
        self._predictions = Predictions(scenario)
        self.portfolio = Portfolio(scenario, search)
        self.coverage = Coverage()
        # Interval that was forecast for the next step with the plan of the last one, seconds.
        self._expected_s: tuple[float, float] | None = None
        self._before: Observation | None = None
        # Whether devices have left since, so that the time until the next step's end holds their absence.
        self._is_disturbed = False
        self._regret: RegretBudget | None = None
        # The first plan while it cannot go on, as devices are away, or has not gone on since; and how much time it
        # would have saved since they are back, seconds.
        self._interrupted: Plan | None = None
        self._missed_s = 0.0
        # The way back to the first plan from a plan, and when it was computed, seconds.
        self._back_of: Plan | None = None
        self._back_s = self._back_at_s = 0.0
        self._elapsed_s = self._duration_s = 0.0
        # Time that the run is expected to go on, seconds.
        self._left_s = math.inf
        self._reviewed_s = 0.0
        self._probes = Probes()

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to use from the next step on, or None to keep ``plan``."""
        before_s = self.portfolio.searching_s
        decided = self._decide(observation, plan)
        self.thinking_s = self.portfolio.searching_s - before_s
        return decided

    def _decide(self, observation: Observation, plan: Plan) -> Plan | None:
        if plan.synchronisation.method != "allreduce":
            return None
        if self._before is None:
            self.portfolio.add(plan)
            self._regret = RegretBudget(plan)
        self._is_disturbed |= bool(observation.gone)
        away = observation.missing
        if away.intersection(plan.devices):
            self._probes.give_up()
            # What is lost is counted from the plan that runs; the latest one may be decided for a later step.
            answer = self._without(away, observation.plan if observation.gone else plan)
            if answer is not None and self._regret is not None and away.intersection(self._regret.first.devices):
                self._interrupted = self._interrupted or self._regret.first
                self._regret.first = answer
            return answer
        if observation.gone:
            return None
        changed = self._learn(observation)
        if observation.plan != plan:
            # The observed step ran with an earlier plan.
            return None
        back = self._when_back(plan, away) or self._when_spent(plan, away)
        if back is not None:
            return back
        if self._probes.incumbent is not None:
            return self._after_probe(plan, self._probes.incumbent, away)
        if not changed and self._elapsed_s - self._reviewed_s < REVIEW_EVERY_S:
            return None
        self._reviewed_s = self._elapsed_s
        self._cover(away)
        return self._better(plan, plan, away) or self._less_rounded(plan) or self._probe(plan, away)

    def _learn(self, observation: Observation) -> bool:
        """Add a step to the forecasts and the prediction bias; return whether a new regime of some link begins.

        Nothing is learned of a step that devices have left, since how long it took by itself is not known.
        """
        # Steps overlap, so the duration of a step is measured from the end of the previous step.
        duration_s = observation.end_s - (self._before.end_s if self._before is not None else 0.0)
        self._elapsed_s += duration_s
        self._duration_s, self._left_s = duration_s, observation.left_s
        if self._is_disturbed:
            self._is_disturbed, self._expected_s, self._before = False, None, observation
            return False
        samples, changed = self._predictions.learn(observation, duration_s)
        if self._before is not None and self._before.plan == observation.plan:
            self._predictions.correct(observation.plan, duration_s, samples)
            if self._expected_s is not None:
                self.coverage.add(self._expected_s, duration_s)
        self._expected_s = self._predictions.interval_s(observation.plan)
        self._count(observation, duration_s, samples)
        self._before = observation
        return changed

    def _count(self, observation: Observation, duration_s: float, samples: Mapping[str, LinkSample]) -> None:
        """Take what a step has lost against the first plan from the budget of regret, or add what it has gained."""
        if self._regret is None:
            return
        self._regret.elapsed_s = self._elapsed_s
        first = self._regret.first
        if observation.plan == first and (self._before is None or self._before.plan == first):
            return
        first_s = self._predictions.expected_s(first, samples)
        count = self._regret.see if self._predictions.used(first) <= samples.keys() else self._regret.guess
        count(duration_s, first_s)

    def _when_back(self, plan: Plan, away: frozenset[str]) -> Plan | None:
        """Return the first plan if its devices are back, and it would have saved the time of the move since; else None.

        A run that never changes its plan goes on with it then, whatever is known of its links.
        """
        first = self._interrupted
        if first is None or self._regret is None or away.intersection(first.devices):
            self._missed_s = 0.0
            return None
        self._regret.first = first
        if plan == first:
            self._interrupted = None
            return None
        first_s, own_s = self._predictions.expected_s(first, {}), self._predictions.step_s(plan)
        self._missed_s = max(0.0, self._missed_s + own_s - first_s)
        if first_s > (1 - LEAST_GAIN_OF_MOVE) * own_s:
            return None
        if self._missed_s < time_to_reach_s(plan, first, self._predictions.observed()):
            return None
        self._probes.give_up()
        return first

    def _when_spent(self, plan: Plan, away: frozenset[str]) -> Plan | None:
        """Return the first plan of the run if the budget of regret only just pays the way back to it; else None.

        If the loss is only at stake, links are probed first.
        """
        regret = self._regret
        if regret is None or plan == regret.first or away.intersection(regret.first.devices):
            return None
        is_fresh = self._back_of == plan and self._elapsed_s - self._back_at_s < REVIEW_EVERY_S
        if is_fresh and regret.left_s >= self._back_s:
            return None
        self._back_of, self._back_at_s = plan, self._elapsed_s
        self._back_s = time_to_reach_s(plan, regret.first, self._predictions.observed())
        if regret.left_s >= self._back_s:
            return None
        dwell_s, _ = self._regime_s(regret.first, plan)
        first_s = self._predictions.expected_s(regret.first, {})
        if dwell_s * (1 - first_s / self._predictions.step_s(plan)) <= self._back_s:
            # Staying costs less than the way back; looked at again in the next review.
            self._back_s = -math.inf
            return None
        if self._probes.incumbent is None and regret.at_stake_s > 0:
            links = self._predictions.links
            stale = [name for name in self._predictions.used(regret.first) if links[name].unseen_s > 0]
            probing = probing_plan(plan, self._scenario, stale, away)
            if probing is not None:
                self._probes.begin(plan)
                return probing
        self._probes.give_up()
        return regret.first

    def _cover(self, away: frozenset[str], *, at_once: bool = False) -> None:
        """Search for plans for several states of the links or, while training stands still, at their means only."""
        self._predictions.believe()
        states = self._predictions.link_states()
        for links in states[:1] if at_once else states:
            self.portfolio.cover(links, away)

    def _better(self, plan: Plan, incumbent: Plan, away: frozenset[str]) -> Plan | None:
        """Return the plan that saves most time compared with ``incumbent``, or None if no change pays.

        The time of the move from the current ``plan`` counts. The module's docstring gives the conditions of a change;
        of plans that meet them and are nearly as fast, the one of `_soonest` is returned.
        """
        own_s = self._predictions.step_s(incumbent)
        observed = self._predictions.observed()
        paying_s: dict[Plan, float] = {}
        best, best_s = None, 0.0
        for other in self.portfolio.plans(away):
            if other == incumbent or not self._predictions.is_known(other):
                continue
            step_s = self._predictions.step_s(other)
            saved_share = 1 - step_s / own_s
            moving_s = time_to_reach_s(plan, other, observed)
            dwell_s, age_s = self._regime_s(incumbent, other)
            if saved_share < self._least_gain(other, moves=moving_s > 0):
                continue
            if moving_s > 0 and (dwell_s * saved_share < SAFETY * moving_s or age_s * saved_share < moving_s):
                continue
            if not self._can_pay(plan, other):
                continue
            net_s = dwell_s * saved_share - moving_s
            paying_s[other] = step_s
            if net_s > best_s:
                best, best_s = other, net_s
        return self._soonest(plan, paying_s, paying_s[best]) if best is not None else None

    def _least_gain(self, other: Plan, *, moves: bool) -> float:
        """Return the share of a step's time that a plan must save, by whether layers move for it."""
        bias = self._predictions.bias
        if bias.has_run(other):
            return LEAST_GAIN_OF_MOVE if moves else LEAST_GAIN
        return LEAST_GAIN_OF_NEW if moves else min(max(LEAST_GAIN, bias.error_of_new), LEAST_GAIN_OF_NEW)

    def _is_worth_a_move(self, other: Plan, step_s: float, own_s: float) -> bool:
        """Return whether layers would move for a plan with steps of ``step_s``, in place of steps of ``own_s``."""
        return step_s <= own_s * (1 - self._least_gain(other, moves=True))

    def _regime_s(self, *plans: Plan) -> tuple[float, float]:
        """Return the expected rest of the regime of the links of plans, at most that of the run, and its age."""
        dwell_s, age_s = self._predictions.regime_s(*plans)
        return min(dwell_s, self._left_s), age_s

    def _less_rounded(self, plan: Plan) -> Plan | None:
        """Return the plan with an earlier compression of the scenario that is nearly as fast; None without one."""
        formats = self._scenario.training.compressions
        if plan.compression == formats[0] or plan.compression not in formats:
            return None
        slow = self._predictions.slow()

        def times_s(each: Plan) -> tuple[float, float]:
            return self._predictions.step_s(each), step_time_s(each, slow)

        own_s = times_s(plan)

        def is_slower(each: Plan) -> bool:
            pairs = zip(times_s(each), own_s, strict=True)
            return any(step_s > (1 + LEAST_ROUNDED) * before_s for step_s, before_s in pairs)

        earlier = (replace(plan, compression=each) for each in formats[: formats.index(plan.compression)])
        return next((each for each in earlier if not is_slower(each)), None)

    def _soonest(self, plan: Plan, step_s: Mapping[Plan, float], best_s: float, away: Collection[str] = ()) -> Plan:
        """Return, of the plans whose steps are nearly as short as ``best_s``, the one that devices reach soonest.

        Predictions, ``step_s``, cannot order plans that are nearer to each other than `LEAST_GAIN` or, of plans that
        have never run, `LEAST_GAIN_OF_MOVE`. Of plans that are reached equally soon, one with an order for exactly
        these rates is the last choice, and one with most microbatches in flight the first.
        """
        observed = self._predictions.observed()

        def is_near(other: Plan) -> bool:
            margin = LEAST_GAIN if self._predictions.bias.has_run(other) else LEAST_GAIN_OF_MOVE
            return step_s[other] <= best_s * (1 + margin)

        def cost(other: Plan) -> tuple[float, bool, int, float]:
            in_flight = sum(stage.in_flight for stage in other.stages)
            return time_to_reach_s(plan, other, observed, away), other.schedule == EXPLICIT, -in_flight, step_s[other]

        return min(filter(is_near, step_s), key=cost)

    def _can_pay(self, plan: Plan, other: Plan) -> bool:
        """Return whether the budget of regret pays a move to ``other`` and the way back to the first plan.

        A change that moves no layers is free, as is the move to the first plan.
        """
        if self._regret is None or other == self._regret.first:
            return True
        worst = self._predictions.worst()
        there_s = time_to_reach_s(plan, other, worst)
        return not there_s or there_s + time_to_reach_s(other, self._regret.first, worst) <= max(
            0.0, self._regret.left_s
        )

    def _probe(self, plan: Plan, away: frozenset[str]) -> Plan | None:
        """Return a plan that probes stale links, or None if no probe is due, affordable and likely to save time."""
        stale = self._predictions.stale_links()
        if not stale or not self._probes.are_due(self._elapsed_s):
            return None
        own_s = self._predictions.step_s(plan)
        hoped_s = {each: self._predictions.optimistic_s(each) for each in self.portfolio.plans(away)}
        # Of other plans the policy would not use one if its links were as good as hoped.
        usable_s = [each_s for each, each_s in hoped_s.items() if self._is_worth_a_move(each, each_s, own_s)]
        probing = probing_plan(plan, self._scenario, stale, away)
        if probing is None or not usable_s:
            return None
        moving_s = time_to_reach_s(plan, probing, self._predictions.observed())
        steps = LEAST_PROBE_STEPS + DECISION_LAG_STEPS
        loss_s = max(0.0, self._predictions.step_s(probing) - own_s) * steps + 2 * moving_s
        if not self._probes.can_cost(loss_s, moving_s, self._elapsed_s):
            return None
        worst = self._predictions.worst()
        step_s, there_s = step_time_s(probing, worst), time_to_reach_s(plan, probing, worst)
        worst_s = steps * step_s + there_s + time_to_reach_s(probing, plan, worst)
        if self._regret is not None and worst_s > self._regret.left_s:
            return None
        if self._left_s * (1 - min(usable_s) / own_s) < PROBE_ODDS * worst_s:
            return None
        self._probes.begin(plan, loss_s, there_s + step_s)
        return probing

    def _after_probe(self, plan: Plan, incumbent: Plan, away: frozenset[str]) -> Plan | None:
        """Return a plan that the probe has shown to be better, else the incumbent; None to continue the probe."""
        is_surprise = self._probes.add_step(self._duration_s)
        if self._probes.steps < LEAST_PROBE_STEPS and not is_surprise:
            return None
        better = None
        if not is_surprise:
            self._cover(away)
            better = self._better(plan, incumbent, away)
            own_s = self._predictions.step_s(incumbent)
            is_promising = self._probes.can_go_on() and any(
                self._predictions.is_known(each)
                and self._can_pay(plan, each)
                and self._is_worth_a_move(each, self._predictions.step_s(each), own_s)
                for each in self.portfolio.plans(away)
            )
            if better is None and is_promising:
                return None
        self._probes.end(self._elapsed_s, found=better is not None)
        return better or incumbent

    def _without(self, away: frozenset[str], plan: Plan) -> Plan | None:
        """Return, of the plans that present devices can reach, one with nearly the shortest step; None without one.

        The next decision reviews it with all searches, beside the training.
        """
        self._cover(away, at_once=True)
        self._reviewed_s = -math.inf
        observed = self._predictions.observed()
        reached = (
            each for each in self.portfolio.plans(away) if time_to_reach_s(plan, each, observed, away) < math.inf
        )
        predicted_s = {each: self._predictions.step_s(each) for each in reached}
        return self._soonest(plan, predicted_s, min(predicted_s.values()), away) if predicted_s else None
