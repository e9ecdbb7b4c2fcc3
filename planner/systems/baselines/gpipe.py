"""GPipe (Huang et al., 2019): a plain pipeline, one device a stage, all forwards and then all backwards.

Assumed: equal numbers of layers on the devices in the cluster's order, on the first ones if there are more devices than
layers; microbatches as `even_microbatches` cuts them. Every microbatch is held at once; where memory does not allow it,
activations are computed again, as GPipe does [paper].
"""

from dataclasses import replace

from planner.cost.in_flight import fitting_depths
from planner.cost.infeasible import no_split_fits
from planner.plan.microbatches import even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario


def gpipe(scenario: Scenario) -> Plan:
    """Return one uniform pipeline.

    Raises:
        InputError: A stage does not fit into memory, even if it recomputes.
    """
    layers = len(scenario.model.layers)
    devices = scenario.cluster.devices[:layers]
    count = len(devices)
    microbatches = even_microbatches(scenario, scenario.training.global_batch, count)
    held = len(microbatches)
    plain = tuple(
        Stage(layers * index // count, layers * (index + 1) // count, (Replica(device.name),), held)
        for index, device in enumerate(devices)
    )
    for stages in (plain, tuple(replace(stage, recompute=True) for stage in plain)):
        if fitting_depths((held,) * count, stages, scenario, microbatches) == (held,) * count:
            pipeline = Pipeline(stages, microbatches)
            return Plan(scenario.name, scenario.model.name, "gpipe", "gpipe", (pipeline,))
    raise no_split_fits(scenario, "gpipe", devices)
