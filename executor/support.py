"""What the executor cannot carry out, though it can be planned and simulated."""

from dataclasses import replace

from executor.job import ComputeMode, Emulator
from executor.training.tensor_parallel_plan import check_groups
from planner.checks.paths import used_links
from planner.effects import ComputeEffects
from planner.faults import LinkOutage
from planner.plan import Plan
from planner.scenario import Scenario
from traces.errors import InputError

_SIMULATE = "'ropebridge simulate' knows how"


def check_supported(plan: Plan, scenario: Scenario, compute: ComputeMode, emulator: Emulator) -> None:
    """Refuse a checked plan, or a scenario, that asks for what only the simulator can do.

    Raises:
        InputError: With the first such thing, and what can be run instead.
    """
    _check_synchronisation(plan)
    if compute == "real":
        check_groups(plan, scenario)
    _check_effects(scenario)
    if emulator == "shaper":
        _check_packets(plan, scenario)
    for number, fault in enumerate(scenario.faults):
        if not (isinstance(fault, LinkOutage) and emulator == "relay"):
            raise _unsupported(
                f"a fault of the kind '{type(fault).__name__}'",
                f"faults[{number}]",
                "keep only outages of links, with the relay",
            )
    if scenario.training.noise_scale and compute == "real":
        _check_noise_scale(plan)


def _check_synchronisation(plan: Plan) -> None:
    if plan.synchronisation.method != "ma":
        return
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            if len(stage.replicas) > 1:
                where = f"pipelines[{index}].stages[{number}].replicas"
                raise _unsupported("averaging of the parameters of replicas", where, "give the stage one replica")


def _check_effects(scenario: Scenario) -> None:
    """Effects on the network are what a real one does anyway; those on compute are made up."""
    # What the launch of kernels takes is in the plan's times.
    if replace(scenario.effects.compute, launch_overhead_s=0.0) != ComputeEffects():
        raise _unsupported("effects on compute", "effects.compute", "remove them: they are simulated, not made")


def _check_packets(plan: Plan, scenario: Scenario) -> None:
    """The shaper holds whole messages back: it has no packets that could be lost or come late."""
    for link in used_links(plan, scenario):
        given = [name for name, value in (("loss", link.loss), ("jitter", link.jitter_s)) if value]
        if given:
            raise InputError(
                f"the emulator 'shaper' knows no {' and no '.join(given)} of packets, which link {link.name} has",
                where=f"cluster.links[{scenario.cluster.links.index(link)}].{given[0]}",
                valid="use the emulator 'relay', or remove them from the link",
            )


def _check_noise_scale(plan: Plan) -> None:
    devices = [stage.replicas for pipeline in plan.pipelines for stage in pipeline.stages]
    if plan.synchronisation.method != "allreduce" or any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        raise _unsupported(
            "the noise scale of a pipeline of several stages",
            "training.noise_scale",
            "run a plan of the strategy 'ddp'",
        )
    if plan.synchronisation.bucket_bytes:
        raise _unsupported(
            "the noise scale of gradients whose sums begin before all of them are there",
            "synchronisation.bucket_bytes",
            "remove it",
        )
    if sum(map(len, devices)) < 2:
        raise InputError(
            "the noise scale of a single device's gradients",
            where="training.noise_scale",
            valid="it compares the gradients of devices that share a batch: two at least",
        )


def _unsupported(what: str, where: str, valid: str) -> InputError:
    return InputError(f"{what} cannot be run yet", where=where, valid=f"{valid}; {_SIMULATE}")
