"""The bottleneck of a plan: the cause whose improvement would save the largest share of the step time."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.explain.loads import PipelineLoads, StageLoad, link_busy_shares, longest_latency_link
from planner.explain.sensitivity import BETTER, Sensitivity
from planner.plan.plan import Plan
from planner.scenario.scenario import Ends, Scenario, with_unlimited_memory
from planner.step.memory import peak_bytes
from traces.common.units import size_text

# Share of the step below which sentences report no saving, because the saving would be rounded to 0 %.
_LEAST_SHARE = 0.005

_FIFTH = f"{100 * (BETTER - 1):.0f} %"


@dataclass(frozen=True, slots=True)
class Savings:
    """Shares of the step time that improvements of all devices or links would save.

    Rates and times improve by the factor `planner.explain.sensitivity.BETTER`.

    Attributes:
        compute_share: Share saved by faster devices.
        link_share: Share saved by higher bandwidths for transfers between stages.
        latency_share: Share saved by shorter latencies of transfers between stages.
        sums_share: Share saved by faster gradient sums.
        depth_share: Share saved if stages kept as many microbatches in flight as hide the round trips.
        needs_memory: Whether the microbatches in flight of ``depth_share`` need more memory than the devices have.
    """

    compute_share: float
    link_share: float
    latency_share: float
    sums_share: float
    depth_share: float
    needs_memory: bool


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bottleneck of a plan.

    Attributes:
        cause: What limits the speed: ``compute``, ``link``, ``latency``, ``memory`` or ``sums of gradients``.
        place: Stage, device or link that limits most, as text.
        shorter_share: Share of the step time saved by improving the cause everywhere.
        there_share: Share of the step time saved by improving the cause at ``place`` alone. For memory, equal to
            ``shorter_share``, since no device alone can keep more microbatches in flight.
        sentence: Sentence that names the cause, the place and both savings.
    """

    cause: str
    place: str
    shorter_share: float
    there_share: float
    sentence: str


def gains_of(of: Sensitivity) -> Savings:
    """Return the shares of the step time that improvements would save."""
    return Savings(
        of.compute_gain(),
        of.link_gain(),
        of.latency_gain(),
        of.sums_gain(),
        of.depth_gain(),
        _fullest_device(of.hiding_plan(), of.scenario)[1] > 1,
    )


def verdict_of(of: Sensitivity, pipelines: Sequence[PipelineLoads], gains: Savings) -> Bottleneck:
    """Return the bottleneck: the cause with the largest saving, compute if several savings are equal.

    The saving of more microbatches in flight counts as memory if memory is too small for them, otherwise as latency.
    """
    saved = {
        "compute": gains.compute_share,
        "link": gains.link_share,
        "latency": max(gains.latency_share, 0.0 if gains.needs_memory else gains.depth_share),
        "memory": gains.depth_share if gains.needs_memory else 0.0,
        "sums of gradients": gains.sums_share,
    }
    cause = max(saved, key=lambda each: saved[each])
    if cause == "link":
        return _link(of, gains)
    if cause == "latency":
        return _latency(of, gains)
    if cause == "memory":
        return _memory(of, pipelines, gains)
    if cause == "sums of gradients":
        return _sums(of, gains)
    return _compute(of, pipelines)


def _compute(of: Sensitivity, pipelines: Sequence[PipelineLoads]) -> Bottleneck:
    number, index, stage = min(_stages(pipelines), key=lambda each: each[2].idle_share)
    place, there = f"stage {index} of pipeline {number}", of.compute_gain(stage.devices)
    every = of.compute_gain()
    sentence = (
        f"compute binds: {place} computes for {1 - stage.idle_share:.2f} of every step; devices {_FIFTH} faster "
        f"{_effect(there, every)}"
    )
    return Bottleneck("compute", place, every, there, sentence)


def _link(of: Sensitivity, gains: Savings) -> Bottleneck:
    ends, busy_share = _busiest(of, sums=False)
    place, there = _between(ends), of.link_gain({ends})
    sentence = (
        f"the link {place} binds: it carries transfers for {busy_share:.2f} of every step; {_FIFTH} more bandwidth "
        f"{_effect(there, gains.link_share)}"
    )
    return Bottleneck("link", place, gains.link_share, there, sentence)


def _latency(of: Sensitivity, gains: Savings) -> Bottleneck:
    ends = longest_latency_link(of)
    assert ends is not None, "without transfers nothing waits for one"
    place, there = _between(ends), of.latency_gain({ends})
    latency_s = max(link.latency_s for link in of.scenario.cluster.links if {link.source, link.target} == set(ends))
    sentence = (
        f"latency binds: {1e3 * latency_s:.3g} ms one way {place}; {100 * (1 - 1 / BETTER):.0f} % less "
        f"{_effect(there, gains.latency_share)}"
    )
    shorter = gains.latency_share
    if gains.depth_share > 0 and not gains.needs_memory:
        sentence += (
            "; as many microbatches in flight as hide the round trips, which memory holds, would make it "
            f"{_percent(gains.depth_share)} shorter"
        )
        shorter = max(shorter, gains.depth_share)
    return Bottleneck("latency", place, shorter, there, sentence)


def _memory(of: Sensitivity, pipelines: Sequence[PipelineLoads], gains: Savings) -> Bottleneck:
    device, wanting = _fullest_device(of.hiding_plan(), of.scenario)
    capacity_bytes = of.scenario.cluster.by_name[device].memory_bytes
    depths = next(
        (
            f" where {stage.in_flight} in flight of stage {index} fit and {stage.hiding_depth} would hide round trips"
            for _, index, stage in _stages(pipelines)
            if device in stage.devices and stage.hiding_depth > stage.in_flight
        ),
        "",
    )
    sentence = (
        f"memory binds: device {device} has {size_text(capacity_bytes)}{depths}; "
        f"{size_text(round(wanting * capacity_bytes))}, and as much more on the others as they need, would make the "
        f"step {_percent(gains.depth_share)} shorter"
    )
    return Bottleneck("memory", f"device {device}", gains.depth_share, gains.depth_share, sentence)


def _sums(of: Sensitivity, gains: Savings) -> Bottleneck:
    ends, busy_share = _busiest(of, sums=True)
    place, there = _between(ends), of.sums_gain({ends})
    sentence = (
        f"sums of gradients bind: they take {of.sums_share():.2f} of every step, and keep the link {place} busy for "
        f"{busy_share:.2f} of it; sums that travel {_FIFTH} faster {_effect(there, gains.sums_share)}"
    )
    return Bottleneck("sums of gradients", place, gains.sums_share, there, sentence)


def _stages(pipelines: Sequence[PipelineLoads]) -> list[tuple[int, int, StageLoad]]:
    """Return (index of the pipeline, index of the stage, load of the stage) for every stage."""
    return [(loads.pipelines[0], index, stage) for loads in pipelines for index, stage in enumerate(loads.stages)]


def _busiest(of: Sensitivity, *, sums: bool) -> tuple[Ends, float]:
    shares = link_busy_shares(of, sums)
    return max(shares.items(), key=lambda each: (each[1], sorted(each[0])))


def _fullest_device(plan: Plan, scenario: Scenario) -> tuple[str, float]:
    """Return the device with the largest ratio of the plan's peak memory to the device's memory, and this ratio."""
    by_name = scenario.cluster.by_name
    peaks = peak_bytes(plan, with_unlimited_memory(scenario))
    ratios = {device: size_bytes / by_name[device].memory_bytes for device, size_bytes in peaks.items()}
    return max(ratios.items(), key=lambda each: each[1])


def _between(ends: Ends) -> str:
    one, other = sorted(ends)[0], sorted(ends)[-1]
    return f"inside {one}" if one == other else f"between {one} and {other}"


def _effect(there_share: float, everywhere_share: float) -> str:
    """Return the end of a sentence: what an improvement would save at one place, and everywhere."""
    if everywhere_share < _LEAST_SHARE:
        return "would hardly make the step shorter, there or everywhere"
    if there_share < _LEAST_SHARE:
        return f"would hardly help there alone, but everywhere make the step {_percent(everywhere_share)} shorter"
    return f"there would make the step {_percent(there_share)} shorter, and everywhere {_percent(everywhere_share)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= _LEAST_SHARE else "less than 1 %"
