"""Adaptation: what a policy observes of a run, what it decides, and what travels for a new plan."""

from typing import TYPE_CHECKING

from traces.common.faces import lazy_face

if TYPE_CHECKING:
    from planner.adapt.adaptation import Adaptation as Adaptation
    from planner.adapt.migration import Migration as Migration
    from planner.adapt.migration import migration_between as migration_between
    from planner.adapt.observation import Observation as Observation
    from planner.adapt.observation import PathObservation as PathObservation
    from planner.adapt.policy import Decision as Decision
    from planner.adapt.policy import Policy as Policy
else:
    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "planner.adapt.observation": ("Observation", "PathObservation"),
            "planner.adapt.policy": ("Policy", "Decision"),
            "planner.adapt.adaptation": ("Adaptation",),
            "planner.adapt.migration": ("Migration", "migration_between"),
        },
    )
