"""A policy that changes to given plans before given steps, and waits for devices that are lost."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.files.plan import parse_plan, plan_json
from planner.plan.plan import Plan

# Pairs of a step and the plan from that step on, in increasing order of steps.
Moves = Sequence[tuple[int, Plan]]


class MovingPolicy:
    """Changes plans before given steps.

    Args:
        moves: The first step of each plan, and the plan.
        log: File to which the plan of each finished step is appended, for `moves_in`; None for no file. A run that is
            ended by force leaves no other record of them.
    """

    name = "moves"

    def __init__(self, moves: Moves, log: Path | None = None) -> None:
        self._moves = moves
        self._log = log

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan of the step after next; None to keep the plan, or to wait for devices that have left."""
        if observation.gone:
            return None
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(json.dumps([observation.step, plan_json(observation.plan)]) + "\n")
        due = [each for step, each in self._moves if step <= observation.step + DECISION_LAG_STEPS]
        is_possible = bool(due) and not {*due[-1].devices} & {*observation.away}
        return due[-1] if is_possible and due[-1] != plan else None


def policy_file(moves: Moves, log: Path) -> str:
    """Return the text of a Python file for ``--policy`` with these moves, and a log."""
    plans = [(step, plan_json(plan)) for step, plan in moves]
    return (
        "from experiments.benches.faults.moves import policy_of\n\n"
        f"MOVES = {plans!r}\n\n\ndef policy(scenario):\n    return policy_of(MOVES, {str(log)!r})\n"
    )


def policy_of(moves: Sequence[tuple[int, str]], log: str) -> MovingPolicy:
    """Return the policy with these moves, whose plans are JSON text, and this log."""
    return MovingPolicy([(step, parse_plan(text)) for step, text in moves], Path(log))


def moves_in(log: Path, end: int) -> Moves:
    """Return the changes of plan before step ``end`` by the log of a `MovingPolicy`."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = sorted({step: text for step, text in lines if step < end}.items())
    groups = [list(group) for _, group in groupby(known, key=lambda each: each[1])]
    return [(group[0][0], parse_plan(group[0][1])) for group in groups]
