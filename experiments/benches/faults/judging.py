"""What must hold for a training that was struck: it ends well or says truthfully why not, and nothing is lost."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from experiments.benches.execution.equal_training import parameter_difference
from experiments.benches.faults.case import STEPS, Case
from experiments.benches.faults.moves import Moves, MovingPolicy
from experiments.benches.faults.trials import AGENT, CUT, FULL_DISK, KILL, RELAY, STOP, Strike
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.events.event import EventKind
from planner.files.plan import parse_plan, plan_json
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from traces.common.atomic import scratch_folder
from traces.common.errors import RunError

# Largest difference of a loss or a parameter, divided by 1 + its value.
MOST_DIFFERENCE = 1e-6

# How often an undisturbed run is repeated whose policy thought for too long, so that it changed plans later.
_REPEATS = 5

_NO_COPY = r"lost devices (?P<devices>.*): no remaining device has a copy of the layers (?P<layers>[\d, ]+),"
# What a run may say when it ends, and the strikes of which one must have struck for it to be true.
_TRUTHS: Mapping[str, Collection[str]] = {
    _NO_COPY: (KILL, STOP, CUT),
    r"no device holds layer \d+ any more": (KILL, STOP, CUT),
    r"all ranks are lost, and with them all copies": (KILL, STOP, CUT),
    # The relay's end before the first step ends the agent.
    r"the relay of the emulated links (ended|did not start)": (RELAY, FULL_DISK),
    r"the agent of this host has ended, and with it all ranks of this host": (AGENT, FULL_DISK),
    r"the agent of this host ended with status": (AGENT, FULL_DISK),
    r"lost after the last step, before sending the files": (KILL, STOP, CUT),
    r"as were the two processes of this rank before": (KILL, STOP),
    r"(?i)no space left|file too large|cannot be written": (FULL_DISK,),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training has left: the ``losses`` of its steps from ``first_step`` on, and the final ``parameters``."""

    first_step: int
    losses: Sequence[float]
    parameters: Mapping[str, torch.Tensor]


def untrue(said: str, struck: Sequence[Strike], plans: Sequence[Plan]) -> str:
    """Return what is wrong with the words with which a run has ended; empty if they are true.

    Args:
        said: What the run has said at its end.
        struck: The strikes that have hit the run.
        plans: The plans that the run may have had.
    """
    if "Traceback" in said:
        return "a traceback"
    for pattern, causes in _TRUTHS.items():
        if (found := re.search(pattern, said)) is None:
            continue
        if not {word for strike in struck for word in (strike.kind, strike.target)} & {*causes}:
            return f"it says what did not happen: {found[0]}"
        if pattern == _NO_COPY:
            return _untrue_layers(found["devices"].split(", "), found["layers"], plans)
        return ""
    return f"it does not say why it has ended: {said.strip()[-200:] or 'nothing'}"


def _untrue_layers(devices: Collection[str], layers: str, plans: Sequence[Plan]) -> str:
    """Return what is wrong with the layers of which no copy is said to be left: lost devices must have had them."""
    held = {
        layer
        for plan in plans
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for layer in range(stage.first_layer, stage.end_layer)
        if any(replica.device in devices for replica in stage.replicas)
    }
    missing = set(map(int, layers.split(", "))) - held
    return f"layers {sorted(missing)} were not on {', '.join(devices)}" if missing else ""


def moves_of(record: RunRecord) -> Moves:
    """Return the first step of each plan of a run, and the plan, as they were when each step was done last."""
    instants_s = [event.start_s for event in record.events if event.kind is EventKind.DECISION]
    computed = [event for event in record.events if event.kind is EventKind.COMPUTE]
    moves: list[tuple[int, Plan]] = []
    for decision, instant_s in zip(record.decisions, sorted(instants_s), strict=True):
        first = decision.first_step
        if decision.answers_departure:
            # Steps that had been finished may have been done again too.
            first = min((event.step for event in computed if event.start_s >= instant_s), default=first)
            moves = [each for each in moves if each[0] < first]
        moves.append((first, decision.plan))
    return moves


def undisturbed(case: Case, moves: Moves) -> Trained:
    """Return what a training leaves that nothing disturbs, with the same changes of plan.

    Raises:
        RunError: This machine is too busy to change plans in time.
    """
    return _undisturbed(case, tuple((step, plan_json(plan)) for step, plan in moves))


@cache
def _undisturbed(case: Case, texts: tuple[tuple[int, str], ...]) -> Trained:
    moves = [(step, parse_plan(text)) for step, text in texts]
    # No decision comes before that of the first step: an earlier change is made at the start.
    early = [plan for step, plan in moves if step < DECISION_LAG_STEPS]
    plan = early[-1] if early else case.plan
    later = [(step, plan) for step, plan in moves if step >= DECISION_LAG_STEPS]
    for _ in range(_REPEATS):
        with scratch_folder() as folder:
            scenario = case.write_scenario(folder / "faults.yaml")
            target = folder / "parameters.safetensors"
            policy = MovingPolicy(later) if later else None
            record = TorchBackend("real", parameters=target, on_this_device=True).run(scenario, plan, policy, STEPS)
            if [each.first_step for each in record.decisions] == [step for step, _ in _changing(plan, later)]:
                return Trained(0, record.losses, load_file(target))
    raise RunError(f"an undisturbed run has changed plans too late {_REPEATS} times: this machine is too busy")


def _changing(plan: Plan, moves: Moves) -> Moves:
    """Return the moves that change the plan, up to the last step."""
    found = []
    for step, new in moves:
        if new != plan and step < STEPS:
            found.append((step, new))
            plan = new
    return found


def compare(trained: Trained, expected: Trained) -> tuple[int, float]:
    """Return the number of steps that are lost, doubled or have another loss, and the largest difference of a number.

    The difference is divided by 1 + the expected value; it is infinite if a number is missing or not finite.
    """
    since = expected.losses[trained.first_step :]
    differences = [abs(one - other) / (1 + abs(other)) for one, other in zip(trained.losses, since, strict=False)]
    wrong = sum(not each <= MOST_DIFFERENCE for each in differences) + abs(len(since) - len(trained.losses))
    of_parameters = parameter_difference(trained.parameters, expected.parameters)
    finite = [each if math.isfinite(each) else math.inf for each in (*differences, of_parameters)]
    return wrong, max(finite)
