"""Strikes real runs at random instants: kills, stops, cuts of links and full disks, on one host and on several.

Every training must go on, or end and say truthfully why, and then go on from its checkpoint, or begin anew if there is
none. Its losses and parameters must be those of an undisturbed run with the same changes of plan, and nothing of it may
stay behind.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from safetensors.torch import load_file

from executor.wan.testbed import missing
from experiments.benches.cases import draw_seeds
from experiments.benches.faults.case import SHAPES, STEPS, Case
from experiments.benches.faults.judging import MOST_DIFFERENCE, Trained, compare, moves_of, undisturbed, untrue
from experiments.benches.faults.moves import Moves, moves_in
from experiments.benches.faults.running import Ended, Running
from experiments.benches.faults.trials import CUT, FULL_DISK, LAUNCHER, Trial, draw
from experiments.benches.processes import networks
from experiments.benches.result import BenchResult, Row, at_most
from experiments.runs.folder import read_record
from planner.runs.event_totals import step_ends_s
from traces.common.atomic import scratch_folder
from traces.common.errors import RopebridgeError

COUNT, QUICK_COUNT = 100, 4

# A run may take so many times as long as an undisturbed one, and so long in addition, before it is said to hang. After
# a cut TCP tries again ever more rarely, so that it takes as long again until bytes flow.
_TIMES, _MORE_S, _TIMES_CUT = 4.0, 90.0, 3.0

# How often a trial is carried out until all its strikes have struck.
_ATTEMPTS = 3

_RESUMED = re.compile(r"resumed from the checkpoint of step (\d+)")


@dataclass(frozen=True, slots=True)
class Usual:
    """The times of a training that nothing disturbs, in seconds.

    Attributes:
        whole_s: From the launch to the end.
        origin_s: From the launch to second 0 of the run.
    """

    whole_s: float
    origin_s: float


def measure_faults(
    quick: bool, tell: Callable[[str], None], count: int | None = None, seed: int | None = None
) -> BenchResult:
    """Carry out trials.

    Args:
        quick: Whether to carry out fewer.
        tell: Function that shows progress.
        count: Number of trials; None for the bench's own number.
        seed: Seed of the first trial, that of each further one is 1 more; None for a random one.
    """
    seeds = draw_seeds("trials", count or (QUICK_COUNT if quick else COUNT), seed, tell)
    lack = missing()
    if lack is not None:
        tell(f"on one host only, and no link is cut: {lack}")
    wheres = ("shaper",) if lack is not None else ("shaper", "relay", "hosts")
    rows: list[Row] = []
    usual: dict[tuple[str, int], Usual] = {}
    for number in seeds:
        rows.append(_carried_out(draw(number, wheres), usual))
        tell(", ".join(f"{key} {f'{cell:.3g}' if isinstance(cell, float) else cell}" for key, cell in rows[-1].items()))
    return BenchResult(
        rows,
        [
            at_most("trials that went wrong, or ended without true words", sum(bool(row["wrong"]) for row in rows), 0),
            at_most("lost or doubled steps", sum(int(row["wrong_steps"]) for row in rows), 0),
            at_most(
                "largest difference of a loss or parameter, over 1 + its value",
                max(float(row["difference"]) for row in rows),
                MOST_DIFFERENCE,
            ),
            at_most("trials that left something behind", sum(bool(row["left"]) for row in rows), 0),
        ],
    )


def _carried_out(trial: Trial, usual: dict[tuple[str, int], Usual]) -> Row:
    """Carry out a trial until all its strikes have struck: a run may be over sooner than others of its place were."""
    place = (trial.case.where, trial.case.places)
    if place not in usual:
        usual[place] = _usual(*place)
    for _ in range(_ATTEMPTS):
        row = carry_out(trial, usual[place])
        if not row["missed"] or row["wrong"]:
            break
        before, took_s = usual[place], float(row["took_s"])
        usual[place] = Usual(took_s, min(before.origin_s, before.origin_s * took_s / before.whole_s))
    return row


def _cuts(trial: Trial, usual: Usual) -> list[tuple[float, float]]:
    """Return start and end of the times without links, in seconds of the run; cuts that overlap are one."""
    # On one host no link is cut before second 0 of the run, at which its links begin.
    origin_s = 0.0 if trial.case.hosts else usual.origin_s
    found: list[tuple[float, float]] = []
    for strike in sorted(trial.strikes, key=lambda strike: strike.at):
        if strike.kind == CUT:
            start_s = max(0.0, strike.at * usual.whole_s - origin_s)
            end_s = start_s + strike.lasts_s
            if found and start_s <= found[-1][1]:
                start_s, last_s = found.pop()
                end_s = max(end_s, last_s)
            found.append((start_s, end_s))
    return found


def carry_out(trial: Trial, usual: Usual) -> Row:
    """Carry out a trial, whose instants are shares of the ``usual`` time; return its row."""
    before = networks()
    cuts = _cuts(trial, usual)
    with scratch_folder() as folder, Running(trial.case, folder, cuts) as running:
        how, wrong, ends = _struck(trial, running, usual)
        steps, difference = STEPS, float("inf")
        if not wrong:
            try:
                trained, moves = _trained(running, ends)
                steps, difference = compare(trained, undisturbed(trial.case, moves))
            except (RopebridgeError, OSError, ValueError) as error:
                wrong = f"its result cannot be read: {error}"
        left = [each for end in ends for each in end.left]
        # What a run writes, and nothing that is half written.
        left += [path.name for path in running.output.parent.iterdir() if path.name.endswith(".part")]
    left += [f"{place}/{name}" for place, names in networks().items() for name in sorted(names - before[place])]
    case = trial.case
    return {
        "trial": trial.number,
        "where": f"{case.places} hosts" if case.hosts else case.where,
        "plans": f"{case.shape}, {case.policy}",
        "optimizer": case.optimizer,
        "strikes": "; ".join(map(str, trial.strikes)),
        "missed": len(trial.strikes) - len(ends[0].struck),
        "end": how,
        "said": ends[0].said.strip().splitlines()[-1][:200] if how != "trained on" and ends[0].said.strip() else "",
        "took_s": sum(end.took_s for end in ends),
        "wrong_steps": steps,
        "difference": difference,
        "left": "; ".join(left),
        "wrong": wrong,
    }


def _struck(trial: Trial, running: Running, usual: Usual) -> tuple[str, str, list[Ended]]:
    """Carry out a run with its strikes, and go on if it has ended; return how it ended, what is wrong, and all ends."""
    lasts_s = sum(strike.lasts_s * (_TIMES_CUT if strike.kind == CUT else 1.0) for strike in trial.strikes)
    limit_s = _TIMES * usual.whole_s + lasts_s + _MORE_S
    first = running.carry_out(trial.strikes, usual.whole_s, limit_s)
    ends = [first]
    if first.is_late:
        return "it hangs", f"it did not end in {limit_s:.0f} s: {first.said.strip()[-300:]}", ends
    if first.status == 0:
        return "trained on", "", ends
    killed = any(strike.target == LAUNCHER and strike.kind == "kill" for strike in first.struck)
    if not (killed and first.status < 0):
        plans = [trial.case.plan, *(plan for _, plan in trial.case.moves)]
        wrong = untrue(first.said, first.struck, plans)
        # Before the run begins, a full disk is refused as wrong input is.
        statuses = (1, 2) if any(strike.kind == FULL_DISK for strike in first.struck) else (1,)
        if first.status not in statuses or wrong:
            return "ended", wrong or f"status {first.status}: {first.said.strip()[-300:]}", ends
    second = running.carry_out((), usual.whole_s, limit_s, resumes=True)
    ends.append(second)
    how = "ended, resumed"
    if second.status == 2 and "there is no complete checkpoint" in second.said:
        running.forget_checkpoints()
        ends.append(running.carry_out((), usual.whole_s, limit_s))
        how = "ended, begun anew"
    if ends[-1].status != 0:
        return how, f"afterwards status {ends[-1].status}: {ends[-1].said.strip()[-300:]}", ends
    return how, "", ends


def _trained(running: Running, ends: list[Ended]) -> tuple[Trained, Moves]:
    """Return what the training has left, and the changes of plan that it has made."""
    record = read_record(running.output)
    found = _RESUMED.search(ends[-1].said)
    # The record of a run that was resumed may have all steps, or those since.
    first = int(found[1]) if found is not None and len(record.losses) < STEPS else 0
    moves = [*moves_in(running.log, first), *moves_of(record)]
    return Trained(first, record.losses, load_file(running.output / "parameters.safetensors")), moves


def _usual(where: str, places: int) -> Usual:
    case = Case(next(iter(SHAPES)), "none", "momentum", where, places)
    with scratch_folder() as folder, Running(case, folder) as running:
        # The longest that an undisturbed run may take on a busy machine.
        ended = running.carry_out((), 1.0, 300.0)
        if ended.status != 0 or ended.left:
            raise RuntimeError(f"an undisturbed run ended with status {ended.status}: {ended.said} {ended.left}")
        ends_s = step_ends_s(read_record(running.output).events)
    return Usual(ended.took_s, max(0.0, ended.took_s - ends_s[-1]))
