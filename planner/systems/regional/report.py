"""What a plan takes to a loss, as text and as a document: what the statistics cost, and what the network saves."""

from dataclasses import asdict, dataclass
from typing import Any

from planner.scenario.convergence import CONFIDENCE
from planner.systems.regional.loss_plan import FoundPlan, LossGoal, LossPlan, extrapolations
from traces.common.units import number_text


@dataclass(frozen=True)
class LossReport:
    """The result of a search for a plan to a loss."""

    goal: LossGoal
    found: FoundPlan

    def document(self) -> dict[str, Any]:
        """Return the report as a dictionary that JSON can represent."""
        summed = self.found.summed
        return {
            "objective": self.goal.name,
            "loss": self.goal.loss,
            "law": self.goal.law.source,
            "assumed": self.goal.assumed,
            "extrapolates": extrapolations(self.found.best, self.goal),
            "plan": _document(self.found.best),
            "summed_every_step": None if summed is None else _document(summed),
        }

    def lines(self, explains: bool) -> list[str]:
        """Return the report as lines of text; ``explains`` adds what statistics cost and what the network saves."""
        best, steps = self.found.best, self.found.best.steps
        by = "assumed convergence" if self.goal.assumed else "convergence"
        least_s, most_s = (each * best.step_s for each in (steps.least, steps.most))
        lines = [
            f"to a loss of {self.goal.loss:g}: {_time(best.time_s)} ({_time(least_s)} to {_time(most_s)} with "
            f"{CONFIDENCE:.0%}), {number_text(best.cost)} USD; {number_text(steps.expected)} steps of "
            f"{number_text(best.step_s)} s",
            f"workers: {_way(best)}",
            f"{by}: {self.goal.law.source}",
        ]
        lines += [f"the law extrapolates to {each}" for each in extrapolations(best, self.goal)]
        return [*lines, *(self._causes() if explains else [])]

    def _causes(self) -> list[str]:
        best, summed = self.found.best, self.found.summed
        if summed is None:
            return ["statistics and network: no plan that sums gradients in every step reaches the loss"]
        if best.mode == summed.mode:
            return ["statistics and network: no other method reaches the loss sooner than sums in every step"]
        steps, before, law = best.steps, summed.steps, self.goal.law
        ratio = law.loss(best.mode, before.expected) / law.loss(summed.mode, before.expected)
        per_cent = 100 * (steps.expected / before.expected - 1)
        waits_s = max(0.0, best.step_s - best.inner_s)
        return [
            f"statistics: {number_text(steps.expected)} steps instead of {number_text(before.expected)} with sums of "
            f"gradients in every step ({per_cent:+.1f} %), at a loss {100 * (ratio - 1):+.2f} % "
            "after equally many",
            f"network: {number_text(best.step_s)} s a step instead of {number_text(summed.step_s)} s "
            f"({100 * (best.step_s / summed.step_s - 1):+.1f} %), of which workers wait {number_text(waits_s)} s for "
            "exchanges",
            f"together: {_time(best.time_s)} and {number_text(best.cost)} USD instead of {_time(summed.time_s)} and "
            f"{number_text(summed.cost)} USD",
        ]


def _document(each: LossPlan) -> dict[str, Any]:
    times = {"time_s": each.time_s, "step_s": each.step_s, "inner_step_s": each.inner_s}
    return {**times, "cost_usd": each.cost, "steps": asdict(each.steps), "mode": asdict(each.mode)}


def _way(each: LossPlan) -> str:
    mode, outer = each.mode, each.plan.synchronisation.outer
    if not each.plan.synchronisation.has_outer_step:
        return "all train together, with sums of gradients in every step"
    text = f"{mode.workers} by {mode.method}, an exchange every {mode.interval_steps} steps"
    if mode.fragments > 1 or outer.overlap_steps:
        text += f" in {mode.fragments} fragments, {outer.overlap_steps} steps of overlap"
    return f"{text}, compression {mode.compression}, by {outer.exchange}"


def _time(seconds: float) -> str:
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{number_text(seconds / length_s)} {unit}"
    return f"{number_text(seconds)} s"
