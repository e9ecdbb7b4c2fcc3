"""Candidates with each format of messages between regions that the scenario allows.

Smaller messages cross slow links sooner, and so let more devices take part: where a format halves the messages, plans
are looked for as if links between regions were twice as fast.
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.check.paths import between_stages
from planner.cost.network import wire_bytes
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario, ends_of, with_better_links


def with_compressions(plan: Plan, scenario: Scenario) -> Iterator[Plan]:
    """Yield a plan with each allowed compression, in the scenario's order; only the first if it crosses no region."""
    first, *others = scenario.training.compressions
    yield replace(plan, compression=first)
    if crosses_regions(plan, scenario):
        yield from (replace(plan, compression=each) for each in others)


def as_if_compressed(scenario: Scenario, compression: str) -> Scenario:
    """Return the scenario with faster links between regions: messages as they are then take as long as compressed ones.

    The scenario itself if messages do not get smaller.
    """
    number_bytes = scenario.training.formats.number_bytes
    sample_bytes = max(layer.output_bytes for layer in scenario.model.layers)
    shorter_bytes = wire_bytes(compression, 1, sample_bytes, number_bytes)
    if not 0 < shorter_bytes < sample_bytes:
        return scenario
    wide = scenario.cluster.wan_links
    ends = {ends_of(link) for link in scenario.cluster.links if link.name in wide}
    return with_better_links(scenario, sample_bytes / shorter_bytes, only=ends)


def crosses_regions(plan: Plan, scenario: Scenario) -> bool:
    """Return whether stages of a plan that are neighbours are in different regions."""
    crosses = scenario.cluster.crosses_regions
    return any(crosses(*pair) for pipeline in plan.pipelines for pair in between_stages(pipeline))
