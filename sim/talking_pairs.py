"""Which devices talk with which during a set-up."""

from planner.cost.async_updates import update_edges
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.compile import compile_step


def communicating_pairs(plan: Plan, scenario: Scenario, changes: bool) -> dict[tuple[str, str], bool]:
    """Return ordered pairs of devices that may talk, and whether they send updates, which are outside of every step.

    Args:
        plan: Of the first step.
        scenario: What it is for.
        changes: Whether a policy may change which replicas of neighbouring stages talk.
    """
    compiled = compile_step(plan, scenario)
    graph, actors = compiled.graph, compiled.actors
    talking = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    pairs = {(actors[sender], actors[receiver]): False for sender, receiver in talking}
    for pipeline in plan.pipelines if changes else ():
        for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            for one in left.replicas:
                for other in right.replicas:
                    pairs |= {(one.device, other.device): False, (other.device, one.device): False}
    pairs |= {(edge.sender, edge.receiver): True for edge in update_edges(plan, scenario)}
    return pairs
