"""Explains a policy's decisions by what had changed in its observations; loads no Bokeh."""

import math
from collections.abc import Mapping

import numpy as np

from experiments.report.data.labels import plan_at, rate_text
from planner.adapt.observation import WINDOW_STEPS, Observation, Observer
from planner.cost.network import nominal_path
from planner.events.event import OUT, EventKind
from planner.events.log import EventLog, as_log
from planner.runs.record import RunRecord

# Ratios of a path's rates, and of a device's compute times, up to which a difference is regarded as noise.
_RATE_RATIO = 1.1
_COMPUTE_RATIO = 1.15
_MOST_NAMED = 2


def reasons(record: RunRecord) -> tuple[str, ...]:
    """Return a text for each decision: what had changed since the previous decision, or from the scenario's values."""
    log = as_log(record.events)
    before: Observation | None = None
    texts = []
    for number, decision in enumerate(record.decisions):
        step = decision.observed_step
        seen = _observed(record, log, step)
        if decision.answers_departure:
            texts.append(_departure(record, log, number))
        else:
            texts.append(_changes(record, seen, before))
            before = seen
    return tuple(texts)


def _observed(record: RunRecord, log: EventLog, step: int) -> Observation:
    """Return the observation of a step, with the delays of the steps before it."""
    observer, steps = Observer(), log.columns["step"]
    for each in range(max(int(steps[steps >= 0].min()), step - WINDOW_STEPS), step):
        observer.observe(log.take(np.flatnonzero(steps == each)), each, plan_at(record, each))
    return observer.observe(log.take(np.flatnonzero(steps == step)), step, plan_at(record, step))


def _departure(record: RunRecord, log: EventLog, number: int) -> str:
    """Return a text with the devices that the new plan lacks, reduced to those with a fault event if there are any."""
    decision = record.decisions[number]
    faults = [event for event in log.take(np.flatnonzero(log.is_a(EventKind.FAULT))) if event.action != OUT]
    old = record.decisions[number - 1].plan if number else record.plan
    gone = [device for device in old.devices if device not in decision.plan.devices]
    known = [device for device in gone if any(event.device == device for event in faults)] or gone
    return f"{', '.join(known)} had gone" if known else "devices had gone"


def _changes(record: RunRecord, seen: Observation, before: Observation | None) -> str:
    rates = _rates_bps(record, seen)
    earlier = _rates_bps(record, before) if before is not None else _rates_bps(record, seen, declared=True)
    ratios = {pair: rate / earlier[pair] for pair, rate in rates.items() if pair in earlier}
    changed = sorted(
        (pair for pair, ratio in ratios.items() if abs(math.log(ratio)) > math.log(_RATE_RATIO)),
        key=lambda pair: -abs(math.log(ratios[pair])),
    )
    word = "was" if before is not None else "declared"
    texts = [
        f"{source} → {target} carried {rate_text(rates[source, target])}, {word} {rate_text(earlier[source, target])}"
        for source, target in changed[:_MOST_NAMED]
    ]
    texts += _slower(seen, before) if before is not None else []
    more = len(changed) - _MOST_NAMED
    texts += [f"and {more} more paths"] if more > 0 else []
    return "; ".join(texts) or "nothing new: a plan that fits better what had been seen"


def _rates_bps(record: RunRecord, seen: Observation, declared: bool = False) -> dict[tuple[str, str], float]:
    """Return the rate between each pair of regions, bits per second: observed, or as the scenario declares it.

    The rate is that between the two devices that sent the most bytes from one region to the other.
    """
    by_name = record.scenario.cluster.by_name
    rates: dict[tuple[str, str], float] = {}
    for path in sorted(seen.paths, key=lambda each: each.size_bytes):
        pair = by_name[path.source].region, by_name[path.target].region
        if pair[0] != pair[1]:
            nominal = nominal_path(record.scenario, path.source, path.target)
            rates[pair] = nominal.rate_bps if declared else path.rate_bps
    return rates


def _slower(seen: Observation, before: Observation) -> list[str]:
    """Return a text for each device whose compute time has changed, if the plan's stages are still the same."""
    if [p.stages for p in seen.plan.pipelines] != [p.stages for p in before.plan.pipelines]:
        return []
    earlier: Mapping[str, float] = dict(before.compute_s)
    ratios = {device: now_s / earlier[device] for device, now_s in seen.compute_s if earlier.get(device)}
    changed = [device for device, ratio in ratios.items() if abs(math.log(ratio)) > math.log(_COMPUTE_RATIO)]
    return [f"{device} computed {ratios[device]:.2g} times as long" for device in changed[:_MOST_NAMED]]
