"""The explanation of a plan's speed: loads of stages and links, the bottleneck, and the gains of improvements."""

from dataclasses import asdict, dataclass
from typing import Any

from planner.cost.parameter_memory import parameter_memory
from planner.explain.loads import BoundaryLoad, PipelineLoads, pipeline_loads
from planner.explain.measured_rates import RatesUse, rates_used
from planner.explain.sensitivity import sensitivity_of
from planner.explain.verdict import Bottleneck, Savings, gains_of, verdict_of
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.scenario.training import PRECISIONS
from planner.systems.auto.robust import RobustRate, robust_rate
from traces.common.units import size_text


@dataclass(frozen=True, slots=True)
class Explanation:
    """The speed of a plan and its causes.

    All figures but ``robust`` come from `planner.step.evaluate`, with links at constant declared rates. There,
    transfers between different pairs of devices do not slow each other down, even if they share a link.

    Attributes:
        pipelines: Loads of stages and links, once for each group of equivalent pipelines.
        sums_share: Share of the step time that would be saved if gradient sums took no time.
        gains: Shares of the step time that improvements would save.
        verdict: Bottleneck of the plan.
        unused_devices: Names of the cluster's devices to which the plan gives no layers.
        precision: The scenario's precision, one of `planner.scenario.training.PRECISIONS`.
        bytes_per_parameter: Bytes that a device holds for each parameter: it, its gradient, optimizer state and copies.
        bytes_source: What these bytes are, and where the numbers are from.
        rates: The measured tables of device kinds from which times of the plan are estimated.
        robust: Throughput that the plan reaches in most windows of the links' traces; None if not evaluated.
    """

    step_s: float
    samples_per_s: float
    pipelines: tuple[PipelineLoads, ...]
    sums_share: float
    gains: Savings
    verdict: Bottleneck
    unused_devices: tuple[str, ...]
    precision: str
    bytes_per_parameter: float
    bytes_source: str
    rates: tuple[RatesUse, ...] = ()
    robust: RobustRate | None = None

    def document(self) -> dict[str, Any]:
        """Return all attributes as a dictionary that JSON can represent."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the explanation as lines of text: precision, loads, unused devices, and the verdict last."""
        number_bytes = PRECISIONS[self.precision].number_bytes
        lines = [
            f"precision {self.precision}: {self.bytes_per_parameter:g} bytes a parameter with its training state "
            f"({self.bytes_source}), {number_bytes} bytes a number in activations and messages"
        ]
        lines += map(str, self.rates)
        lines += [line for loads in self.pipelines for line in _pipeline_lines(loads)]
        if self.unused_devices:
            lines.append(f"unused devices: {', '.join(self.unused_devices)}")
        lines.append(f"sums of gradients: {self.sums_share:.2f} of the step")
        if self.robust is not None:
            lines.append(_robust_line(self.robust, self.samples_per_s))
        lines.append(self.verdict.sentence)
        return "\n".join(lines)


def explain(plan: Plan, scenario: Scenario, quantile: float | None = None) -> Explanation:
    """Return the explanation of the speed of a plan that passes `planner.check`.

    ``quantile`` is the share of the windows of the links' traces in which the plan may be slower than
    `Explanation.robust` reports; None to evaluate at declared rates only.

    Raises:
        InputError: The order of actions deadlocks, or ``quantile`` is not a share below 1.
    """
    of, held = sensitivity_of(plan, scenario), parameter_memory(scenario.training)
    pipelines, gains = pipeline_loads(of), gains_of(of)
    return Explanation(
        of.step_s,
        plan.global_batch / of.step_s if of.step_s else float("inf"),
        pipelines,
        of.sums_share(),
        gains,
        verdict_of(of, pipelines, gains),
        tuple(device.name for device in scenario.cluster.devices if device.name not in plan.devices),
        scenario.training.precision,
        held.total_bytes,
        str(held),
        rates_used(plan, scenario),
        None if quantile is None else robust_rate(plan, scenario, quantile),
    )


def _robust_line(robust: RobustRate, steady_samples_per_s: float) -> str:
    return (
        f"{robust.samples_per_s:.4g} samples/s or more in {100 * (1 - robust.quantile):.4g} % of {robust.windows} "
        f"windows of {robust.window_s:.4g} s; {steady_samples_per_s:.4g} on steady links"
    )


def _pipeline_lines(loads: PipelineLoads) -> list[str]:
    which = f"pipeline {loads.pipelines[0]}"
    if len(loads.pipelines) > 1:
        which += f" and {len(loads.pipelines) - 1} alike"
    lines = [which]
    for index, stage in enumerate(loads.stages):
        depth = f"{stage.in_flight} in flight"
        if stage.hiding_depth > stage.in_flight:
            depth += f" ({stage.hiding_depth} would hide the round trips)"
        lines.append(
            f"  stage {index}: computes {stage.compute_s:.3g} s, idle {stage.idle_share:.2f} of the step, "
            f"memory {size_text(stage.memory_bytes)} of {size_text(stage.capacity_bytes)} ({stage.memory_share:.2f}), "
            f"{depth}" + (f", groups through {stage.group_transport}" if stage.group_transport else "")
        )
    for boundary in loads.boundaries:
        lines.append(
            f"  stage {boundary.source_stage} to {boundary.target_stage} ({boundary.source} to {boundary.target}): "
            f"busy {boundary.busy_share:.2f} of the step, {1e3 * boundary.latency_s:.3g} ms on the way, "
            f"through {boundary.transport}{_copies(boundary)}"
        )
    return lines


def _copies(boundary: BoundaryLoad) -> str:
    if not boundary.copy_out_s and not boundary.copy_in_s:
        return ""
    return f", {1e3 * boundary.copy_out_s:.3g} ms to the host and {1e3 * boundary.copy_in_s:.3g} ms from it"
