"""Runs a fidelity case in both backends, several times for real, and returns the errors and the spread of real runs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean

from executor.backend import TorchBackend
from executor.core.job import Emulator
from experiments.benches.fidelity.case import Case
from experiments.benches.fidelity.kept import KeptRuns, Measured
from experiments.benches.result import Row
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.systems.registry import make_policy
from sim.simulator import Simulator


@dataclass(frozen=True, slots=True)
class Outcome:
    """What both backends measured of a case: the simulation, and each real run."""

    case: Case
    simulated: Measured
    real: Sequence[Measured]

    @property
    def throughput_error(self) -> float:
        """Relative error of the simulated throughput against the mean of the real runs."""
        return self.simulated_rate / mean(self.rates) - 1

    @property
    def step_error(self) -> float:
        """Relative error of the simulated median step time against the mean of those of the real runs."""
        return self.simulated.metrics.step_s / self.real_step_s - 1

    @property
    def real_step_s(self) -> float:
        """Mean of the median step times of the real runs, seconds."""
        return mean(each.metrics.step_s for each in self.real)

    @property
    def simulated_rate(self) -> float:
        """Throughput of the simulation, samples per second."""
        return self.simulated.metrics.samples_per_s

    @property
    def rates(self) -> list[float]:
        """Throughput of each real run, samples per second."""
        return [each.metrics.samples_per_s for each in self.real]

    @property
    def decides(self) -> bool:
        """Whether the policy changes the plan in the simulation or in a real run."""
        return any(each.changes for each in (self.simulated, *self.real))

    @property
    def moves_layers(self) -> bool:
        """Whether layers move in the simulation and in every real run."""
        return all(each.moves_layers for each in (self.simulated, *self.real))

    @property
    def worst_of_a_run(self) -> float:
        """Largest absolute error of the simulated throughput against a single real run."""
        return max(abs(self.simulated_rate / rate - 1) for rate in self.rates)

    @property
    def decisions_apart(self) -> int:
        """Largest difference between the number of decisions in the simulation and in a real run."""
        return max(abs(len(self.simulated.changes) - len(each.changes)) for each in self.real)

    @property
    def unlike_decisions(self) -> int:
        """Number of real runs whose decisions change other kinds of things than those of the simulation."""
        return sum(_kinds(each.changes) != _kinds(self.simulated.changes) for each in self.real)

    @property
    def byte_difference(self) -> int:
        """Largest difference between the bytes on links between regions in the simulation and in a real run."""
        return max(abs(self.simulated.metrics.wan_bytes - each.metrics.wan_bytes) for each in self.real)

    @property
    def sways(self) -> bool:
        """Whether three ranks or more use links that are shared or change."""
        return self.case.ranks >= 3 and (self.case.has_traces or self.case.has_shared_links)

    def row(self) -> Row:
        """Return the outcome as a row of the bench's table."""
        return {
            "case": self.case.name,
            "scenario": self.case.scenario.name,
            "ranks": self.case.ranks,
            "policy": self.case.policy,
            "tcp": self.case.tcp,
            "shared_links": self.case.has_shared_links,
            "traces": self.case.has_traces,
            "unequal_replicas": self.case.has_unequal_replicas,
            "method": self.case.plan.synchronisation.method,
            "moves_layers": self.moves_layers,
            "simulated_decisions": len(self.simulated.changes),
            "real_decisions": "/".join(str(len(each.changes)) for each in self.real),
            "simulated_staleness": self.simulated.metrics.staleness,
            "real_staleness": mean(each.metrics.staleness for each in self.real),
            "simulated_step_s": self.simulated.metrics.step_s,
            "real_step_s": self.real_step_s,
            "step_error": self.step_error,
            "simulated_samples_per_s": self.simulated_rate,
            "real_samples_per_s": mean(self.rates),
            "real_spread": (max(self.rates) - min(self.rates)) / mean(self.rates),
            "throughput_error": self.throughput_error,
            "wan_byte_difference": self.byte_difference,
        }


def compare(case: Case, runs: int, emulator: Emulator, tell: Callable[[str], None], kept: KeptRuns) -> Outcome:
    """Simulate a case, then run it for real until there are ``runs`` real runs, of which ``kept`` may have some.

    The simulation can use nothing of the real runs.
    """
    case = replace(case, scenario=case.simulated_scenario)
    simulated = _run(case, Simulator(backup_every=case.backup_every))
    backend = TorchBackend("paced", emulator=emulator, tcp=case.tcp, backup_every=case.backup_every, tell=tell)
    real = kept.real_runs(case.name, simulated)[:runs]
    while len(real) < runs:
        real.append(_run(case, backend))
        kept.keep(case.name, simulated, real)
    return Outcome(case, simulated, real)


def _run(case: Case, backend: Simulator | TorchBackend) -> Measured:
    record = backend.run(case.scenario, case.plan, make_policy(case.policy, case.scenario), case.steps)
    return Measured.of(record, measure(record))


def _kinds(changes: Sequence[str]) -> set[str]:
    """Return what decisions change, in the words of `Decision.change` without its numbers and names."""
    return {re.split(r"[\d\[]", part)[0].strip() for each in changes for part in each.split("; ")}


def gain_differences(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the simulated gain of each policy that decides, less the real gain, by case.

    The gain is the throughput relative to a run with the same plan and number of steps, and no policy; policies without
    such a case, such as those that answer a departure, are left out.
    """
    found = {}
    bases = {_start(each.case): each for each in outcomes if each.case.policy == "none"}
    for one in outcomes:
        base = bases.get(_start(one.case))
        if one.decides and base is not None:
            simulated = one.simulated_rate / base.simulated_rate
            found[one.case.name] = simulated - mean(one.rates) / mean(base.rates)
    return found


def _start(case: Case) -> tuple[str, str, Plan, int]:
    """Return what a case has in common with the same case without a policy; other strategies may make the same plan."""
    return case.scenario.name, case.tcp, replace(case.plan, strategy=""), case.steps


def rank_correlations(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return Kendall's rank correlation of simulated and real throughput, within each scenario of four plans or more.

    Two plans whose real runs overlap are tied, and count neither way. Cases with a policy are left out, and those with
    the machine's own TCP, since their networks differ from those of the other cases.
    """
    by_scenario: dict[str, list[Outcome]] = {}
    for each in outcomes:
        if each.case.tcp == "wide-area" and each.case.policy == "none":
            by_scenario.setdefault(each.case.scenario.name, []).append(each)
    found = {}
    for name, members in by_scenario.items():
        signs = [_same_order(*pair) for pair in combinations(members, 2)] if len(members) >= 4 else []
        if any(signs):
            found[name] = sum(signs) / sum(map(abs, signs))
    return found


def _same_order(one: Outcome, other: Outcome) -> int:
    """Return 1 if both backends order two cases alike, -1 if not, and 0 if the real runs overlap."""
    if min(one.rates) <= max(other.rates) and min(other.rates) <= max(one.rates):
        return 0
    is_real = mean(one.rates) > mean(other.rates)
    is_simulated = one.simulated_rate > other.simulated_rate
    return 1 if is_real == is_simulated else -1
