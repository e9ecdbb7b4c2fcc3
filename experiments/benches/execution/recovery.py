"""Kills or stops ranks at random instants; measures the time until the next step is finished, and lost updates.

With policy `asteroid-replay` training goes on with the remaining ranks. When the launcher is killed, all processes end,
and the run is resumed from a checkpoint. For comparison, torchrun restarts all ranks from a checkpoint of every step.
"""

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from experiments.benches.cases import KINDS, recovery_case
from experiments.benches.execution.equal_training import parameter_difference
from experiments.benches.execution.lost_launcher import resumption_s
from experiments.benches.execution.torch_restart import restart_s
from experiments.benches.result import BenchResult, Row, at_least, at_most
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.runs.record import RunRecord
from planner.scenario.faults import Absence, Fault, Hang
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from traces.common.atomic import scratch_folder

TRIALS, QUICK_TRIALS = 50, 5
LAUNCHERS, QUICK_LAUNCHERS = 5, 1
# Numbers of trials in which a rank of torchrun is killed, and in which one is stopped, which lasts until a time-out.
RESTARTS, QUICK_RESTARTS = (7, 3), (1, 0)
SEED = 0

STEPS = 80
POLICY = "asteroid-replay"
# Steps from one backup of the state to the next; torchrun has a checkpoint of every step, too.
BACKUP_EVERY = 1

# Ranks are killed or stopped at a time of the run between these seconds, long before its end.
_EARLIEST_S, _LATEST_S = 0.5, 2.0

LEAST_SPEED_UP = 14.0
MOST_DIFFERENCE = 1e-6


def measure_recovery(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Kill and stop ranks of ropebridge and of torchrun; compare the times to the next step, and check the training."""
    chance = random.Random(SEED)
    scenario, plan = recovery_case()
    undisturbed, expected = _train(scenario, plan, policy="none")
    rows: list[Row] = []
    for trial in range(QUICK_TRIALS if quick else TRIALS):
        device = list(KINDS)[trial % len(KINDS)]
        start_s = chance.uniform(_EARLIEST_S, _LATEST_S)
        fault: Fault = Absence(device, start_s) if trial // len(KINDS) % 2 == 0 else Hang(device, start_s)
        record, parameters = _train(replace(scenario, faults=(fault,)), plan, policy=POLICY)
        rows.append(_row(fault, record, undisturbed, parameter_difference(parameters, expected)))
        tell(f"{rows[-1]['how']} {device}: next step after {float(rows[-1]['next_step_s']):.3f} s")
    for _ in range(QUICK_LAUNCHERS if quick else LAUNCHERS):
        rows.append(_launcher_row(chance, undisturbed, expected))
        tell(f"the launcher killed, and resumed: next step after {float(rows[-1]['next_step_s']):.3f} s")
    restarts: dict[str, list[float]] = {"killed": [], "stopped": []}
    killed, stopped = QUICK_RESTARTS if quick else RESTARTS
    for how, blow in [("killed", signal.SIGKILL)] * killed + [("stopped", signal.SIGSTOP)] * stopped:
        restarts[how].append(restart_s(chance, blow))
        rows.append({"kind": "torchrun", "how": how, "next_step_s": restarts[how][-1]})
        tell(f"torchrun, {how}: next step after {restarts[how][-1]:.3f} s")
    ours = [row for row in rows if row["kind"] != "torchrun"]
    speed_ups = [
        at_least(
            f"torchrun's median to ours, {how}",
            median(theirs) / median(float(row["next_step_s"]) for row in ours if row["how"] == how),
            LEAST_SPEED_UP,
        )
        for how, theirs in restarts.items()
        if theirs
    ]
    return BenchResult(
        rows,
        [
            *speed_ups,
            at_most("lost or doubled updates", sum(int(row["wrong_steps"]) for row in ours), 0),
            at_most(
                "largest difference of a parameter from undisturbed training, over 1 + its value",
                max(float(row["difference"]) for row in ours),
                MOST_DIFFERENCE,
            ),
        ],
    )


def _train(scenario: Scenario, plan: Plan, policy: str) -> tuple[RunRecord, dict[str, torch.Tensor]]:
    with scratch_folder() as folder:
        target = folder / "parameters.safetensors"
        backend = TorchBackend("real", parameters=target, backup_every=BACKUP_EVERY)
        record = backend.run(scenario, plan, make_policy(policy, scenario), STEPS)
        return record, load_file(target)


def _launcher_row(chance: random.Random, undisturbed: RunRecord, expected: Mapping[str, torch.Tensor]) -> Row:
    next_step_s, losses, parameters = resumption_s(chance, STEPS)
    since = dict(enumerate(undisturbed.losses))
    return {
        "kind": "the launcher, with the controller; resumed",
        "how": "killed",
        "next_step_s": next_step_s,
        "wrong_steps": sum(_is_wrong(loss, since[step]) for step, loss in losses.items()),
        "difference": parameter_difference(parameters, expected),
    }


def _is_wrong(loss: float, undisturbed: float) -> bool:
    """Return whether a loss differs from the undisturbed one, or is NaN."""
    return not abs(loss - undisturbed) <= MOST_DIFFERENCE * (1 + abs(undisturbed))


def _row(fault: Fault, record: RunRecord, undisturbed: RunRecord, difference: float) -> Row:
    assert isinstance(fault, Absence | Hang)
    (decision,) = record.decisions
    # The first step that had not been finished before the failure; repeated steps do not count.
    next_s = step_ends_s(record.events)[decision.first_step]
    wrong = sum(map(_is_wrong, record.losses, undisturbed.losses))
    return {
        "kind": KINDS[fault.device],
        "how": "killed" if isinstance(fault, Absence) else "stopped",
        "device": fault.device,
        "at_s": fault.start_s,
        "next_step_s": next_s - fault.start_s,
        "wrong_steps": wrong + abs(len(record.losses) - len(undisturbed.losses)),
        "difference": difference,
    }
