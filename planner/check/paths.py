"""Every two devices that exchange anything in a plan have a path."""

from collections.abc import Iterator
from itertools import combinations

from planner.cost.allreduce import gradient_syncs
from planner.plan.plan import Pipeline, Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario


def check_paths(plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan that needs a link that is not there.

    Raises:
        InputError: With the two devices.
    """
    for source, target in exchanging(plan, scenario):
        scenario.cluster.path(source, target)


def exchanging(plan: Plan, scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Give the (source, target) devices between which the plan sends something; pairs may come again."""
    for pipeline in plan.pipelines:
        yield from _between_stages(pipeline)
        for stage in pipeline.stages:
            for replica in stage.replicas:
                yield from _both_ways(combinations(replica.devices, 2))
    for sync in gradient_syncs(plan, scenario):
        for device in sync.devices:
            for exchange in sync.exchanges(device):
                if exchange.send_to is not None:
                    yield device, sync.devices[exchange.send_to]
    if plan.synchronisation.method != "allreduce":
        for one, other in combinations(plan.pipelines, 2):
            yield from _both_ways(_copies(one, other))


def used_links(plan: Plan, scenario: Scenario) -> tuple[Link, ...]:
    """Return the links that the plan sends anything over, in the order of `exchanging`.

    Raises:
        InputError: Two devices that exchange something have no path.
    """
    paths = (scenario.cluster.path(*pair) for pair in dict.fromkeys(exchanging(plan, scenario)))
    return tuple(dict.fromkeys(link for path in paths for link in path))


def _between_stages(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    for senders, receivers in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        pairs = ((s.device, r.device) for s in senders.replicas for r in receivers.replicas)
        yield from _both_ways((source, target) for source, target in pairs if source != target)


def _copies(one: Pipeline, other: Pipeline) -> Iterator[tuple[str, str]]:
    """Devices of two pipelines that hold the same layer."""
    for stage in one.stages:
        for match in other.stages:
            if stage.first_layer < match.end_layer and match.first_layer < stage.end_layer:
                yield from ((a.device, b.device) for a in stage.replicas for b in match.replicas)


def _both_ways(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for source, target in pairs:
        yield source, target
        yield target, source
