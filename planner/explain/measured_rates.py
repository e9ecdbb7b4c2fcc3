"""Which measured tables of device kinds the times of a plan come from, and where the plan leaves the measured sizes."""

from collections import defaultdict
from dataclasses import dataclass

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RatesUse:
    """The use of one measured table of a kind by a plan.

    Attributes:
        kind: The kind of device.
        source: The file of the table, and how it was measured.
        layers: Indices of the layers that the plan places on devices of the kind and whose times are from the table.
        outside: Those of them that have a matrix product of another size than the measured ones with some microbatch;
            the rate of the nearest measured size counts there.
    """

    kind: str
    source: str
    layers: tuple[int, ...]
    outside: tuple[int, ...]

    def __str__(self) -> str:
        """Return the use as one line of text."""
        use = f"rates of {self.kind}, layers {_ranges(self.layers)}: measured, {self.source}"
        if not self.outside:
            return f"{use}; all products have measured sizes"
        return f"{use}; outside the measured sizes, at the nearest rates: layers {_ranges(self.outside)}"


def rates_used(plan: Plan, scenario: Scenario) -> tuple[RatesUse, ...]:
    """Return the measured tables that the times of a plan come from; none if all are from datasheets or profiles."""
    kinds = {device.name: device.kind for device in scenario.cluster.devices}
    found: dict[tuple[str, str], dict[int, bool]] = defaultdict(dict)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            parts = [stage.intervals(size) for size in set(pipeline.microbatches)]
            for index, replica in enumerate(stage.replicas):
                model = scenario.model.at_degree(replica.tensor_parallel)
                for layer in stage.layers:
                    for kind in {kinds[device] for device in replica.devices}:
                        table = model.layers[layer].times.get(kind)
                        rates = None if table is None else table.rates
                        if rates is not None:
                            own = (intervals[index] for intervals in parts)
                            leaves = any(end > first and not rates.cover(end - first) for first, end in own)
                            uses = found[kind, rates.source]
                            uses[layer] = uses.get(layer, False) or leaves
    return tuple(
        RatesUse(kind, source, tuple(sorted(uses)), tuple(sorted(layer for layer in uses if uses[layer])))
        for (kind, source), uses in sorted(found.items())
    )


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return rising numbers in words, such as ``0, 3 to 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
