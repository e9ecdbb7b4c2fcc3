"""Checks that a real run supports a plan and a scenario, and a warning about links that are faster than the relay."""

from collections.abc import Iterator
from math import inf

from executor.core.job import ComputeMode, Emulator
from planner.adapt.policy import Decision
from planner.check.paths import communicating_pairs, nccl_pairs, used_links
from planner.cost.network import own_link
from planner.cost.synchronisation import GradientSync, gradient_syncs, uneven_sum
from planner.plan.plan import DECOUPLED, Plan, Replica
from planner.plan.regional_batch import foreign_samples
from planner.scenario.cluster import Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario, code_to_train
from planner.scenario.training import PRECISIONS
from traces.common.errors import InputError, RunError, find_by_name


def check_groups(plan: Plan, scenario: Scenario) -> None:
    """Raise `InputError` if a run does not support the plan's tensor-parallel groups."""
    where = {replica.device: f"pipelines[{p}].stages[{s}].replicas[{r}]" for p, s, r, replica in _replicas(plan)}
    groups = {replica.device: replica.devices for *_, replica in _replicas(plan)}
    first = next((where[leader] for leader, devices in groups.items() if len(devices) > 1), None)
    if first is None:
        return
    if plan.synchronisation.method != "allreduce":
        raise InputError(
            f"tensor parallelism with method '{plan.synchronisation.method}' cannot be run yet",
            where=f"{first}.partners",
            valid="leave 'partners' out, or use the method 'allreduce'",
        )
    if scenario.training.noise_scale:
        raise InputError(
            "the noise scale with tensor parallelism cannot be measured yet",
            where="training.noise_scale",
            valid=f"remove it, or leave 'partners' out in {first}",
        )
    if uneven := uneven_sum(plan, scenario):
        sync, one, other = uneven
        what, it = ("tied layers", "them") if sync.tied else (f"layer {sync.first_layer}", "the layer")
        raise InputError(
            f"{len(groups[other])} devices share {what}, but {len(groups[one])} devices share {it} in {where[one]}",
            where=f"{where[other]}.partners",
            valid=f"share {it} among equally many devices in every replica",
        )
    for sync in gradient_syncs(plan, scenario):
        for place in range(1, len(groups[sync.devices[0]])):
            _check_paths(sync.among(groups[leader][place] for leader in sync.devices), scenario)


def _check_paths(sync: GradientSync, scenario: Scenario) -> None:
    for device in sync.devices:
        for exchange in sync.exchanges(device):
            if exchange.send_to is not None:
                scenario.cluster.path(device, sync.devices[exchange.send_to])


def _replicas(plan: Plan) -> Iterator[tuple[int, int, int, Replica]]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for r, replica in enumerate(stage.replicas):
                yield p, s, r, replica


_SIMULATE = "or use 'ropebridge simulate'"

# Precisions of real compute. Gradients in fp16 become zero unless the loss is scaled, which a run does not do.
_TRAINED = ("fp32", "tf32", "bf16")


def check_precision(precision: str, where: str) -> None:
    """Raise `InputError` for a precision that layers cannot be trained or measured in."""
    if precision in PRECISIONS and precision not in _TRAINED:
        raise _unsupported(f"training in {precision}", where, f"choose among {', '.join(_TRAINED)}")
    find_by_name(precision, dict.fromkeys(_TRAINED), "precision", where=where)


def check_supported(
    plan: Plan,
    scenario: Scenario,
    compute: ComputeMode,
    emulator: Emulator,
    *,
    recovers: bool = False,
    checkpoints: bool = False,
    on_this_device: bool = False,
) -> None:
    """Check that a run supports a plan that has passed `check_plan`, and its scenario.

    With ``recovers`` the run must survive the loss of ranks; with ``checkpoints`` it reads or writes checkpoints; with
    ``on_this_device`` it may compute on other devices than those of the scenario, and does not use NCCL.

    Raises:
        InputError: The message names the first thing that only the simulator supports, and an alternative.
    """
    if compute == "real":
        check_precision(scenario.training.precision, "training.precision")
        check_groups(plan, scenario)
        _check_tied(plan, scenario)
        _check_regional_data(plan, scenario)
        replaces = recovers or plan.synchronisation.is_decoupled
        if not on_this_device and (replaces or emulator != "none"):
            option = "--backup-every" if recovers else "synchronisation.method" if replaces else "--emulate-wan"
            _check_nccl(plan, scenario, option)
    _check_effects(scenario, compute)
    if emulator == "shaper":
        _check_packets(plan, scenario)
    for number, fault in enumerate(scenario.faults):
        where = f"faults[{number}]"
        if isinstance(fault, LinkOutage):
            if emulator != "relay":
                problem = "a link that is out can only be emulated by the relay"
                raise InputError(problem, where=where, valid=f"add '--emulator relay', {_SIMULATE}")
        elif not (recovers or plan.synchronisation.is_decoupled):
            problem = "a device that leaves or hangs would end this run"
            valid = f"add '--backup-every', choose the method {DECOUPLED}, {_SIMULATE}"
            raise InputError(problem, where=where, valid=valid)
    if scenario.training.noise_scale and compute == "real":
        _check_noise_scale(plan)
    if plan.synchronisation.is_decoupled:
        _check_decoupled(plan)
    if recovers:
        _check_recovery(plan)
    if checkpoints:
        _check_checkpoints(plan, compute)
    if compute == "real":
        code_to_train(scenario)


def check_spread(scenario: Scenario, emulator: Emulator) -> None:
    """Raise `InputError` if a run on several machines asks for emulated links or for faults."""
    if emulator != "none":
        raise InputError(
            "links are emulated on one machine only",
            where="--emulate-wan",
            valid="leave the option out, to use the network between the hosts",
        )
    if scenario.faults:
        raise InputError(
            "faults are carried out on one machine only", where="faults[0]", valid="remove all faults from the scenario"
        )


def check_decision(
    decision: Decision,
    *,
    scenario: Scenario,
    compute: ComputeMode,
    emulator: Emulator,
    recovers: bool,
    on_this_device: bool = False,
) -> None:
    """Raise `RunError` if a running job cannot carry out a decision of the policy; the message gives the reason."""
    when = f"the decision after step {decision.observed_step}"
    try:
        check_supported(decision.plan, scenario, compute, emulator, recovers=recovers, on_this_device=on_this_device)
    except InputError as error:
        raise RunError(f"{when} cannot be carried out: {error}") from error


def _check_tied(plan: Plan, scenario: Scenario) -> None:
    """Raise `InputError` if pipelines that train without a barrier hold copies of shared parameters.

    Both ends of a pipeline would receive the sum of the copies' gradients, and add it twice.
    """
    if scenario.model.tied_layers and plan.synchronisation.method != "allreduce":
        raise InputError(
            f"method '{plan.synchronisation.method}' cannot train a model whose layers share parameters",
            where="synchronisation.method",
            valid="use the method 'allreduce', or a model without tied embeddings",
        )


def _check_regional_data(plan: Plan, scenario: Scenario) -> None:
    """Raise `InputError` if regions own data, and a plan needs samples of another region or batches of other sizes."""
    if not scenario.data:
        return
    if scenario.training.batch is not None:
        raise InputError(
            "the batch cannot change where regions own data, whose samples are counted in steps of equal batches",
            where="training.batch",
            valid="leave it out, or leave 'data' out of the scenario",
        )
    devices = scenario.cluster.by_name
    for index, pipeline in enumerate(plan.pipelines):
        for replica in pipeline.stages[0].replicas:
            region = devices[replica.device].region
            if region not in scenario.data:
                raise InputError(
                    f"device '{replica.device}' reads samples, but its region '{region}' stores none",
                    where=f"pipelines[{index}].stages[0]",
                    valid=f"begin the pipeline in {' or '.join(scenario.data)}, or leave 'data' out of the scenario",
                )
    if foreign := foreign_samples(plan, scenario):
        index, region, other = foreign
        raise InputError(
            f"the last stage, in region '{region}', needs the targets of samples that '{other}' stores",
            where=f"pipelines[{index}]",
            valid="begin and end each pipeline in one region, or leave 'data' out of the scenario",
        )


def _check_nccl(plan: Plan, scenario: Scenario, option: str) -> None:
    """Raise `InputError` if NCCL carries messages of a plan in a run with an option that excludes this.

    NCCL cannot go on after the loss of a rank, and does not pass the emulated links.
    """
    through = nccl_pairs(plan, scenario)
    if through:
        raise InputError(
            f"NCCL carries messages between devices '{through[0][0]}' and '{through[0][1]}', but not with this option",
            where=option,
            valid="write 'effects: {transport: {nccl: false}}' into the scenario, or leave the option out",
        )


def _check_recovery(plan: Plan) -> None:
    valid = "leave '--backup-every' out"
    how = plan.synchronisation
    if how.method != "allreduce" and not how.has_common_outer_step:
        what = f"copies of the state of pipelines with method '{how.method}'"
        others = "" if how.is_decoupled else ", and write checkpoints or choose a method with outer steps"
        raise _unsupported(what, "synchronisation.method", f"{valid}{others}")
    if any(replica.partners for replica in plan.replicas):
        raise _unsupported("recovery of tensor-parallel groups", "pipelines", valid)


def _check_decoupled(plan: Plan) -> None:
    method = plan.synchronisation.method
    if any(replica.partners for replica in plan.replicas):
        raise _unsupported(f"tensor parallelism with method '{method}'", "pipelines", "leave 'partners' out")


def check_keeps_state(compute: ComputeMode, option: str) -> None:
    """Raise `InputError` if a run with this kind of compute has no state for an ``option`` about checkpoints."""
    if compute != "real":
        raise InputError(
            "paced compute has no state for checkpoints, since it trains nothing",
            where=option,
            valid="leave the option out, or choose '--compute real'",
        )


def _check_checkpoints(plan: Plan, compute: ComputeMode) -> None:
    check_keeps_state(compute, "--checkpoint")
    if plan.synchronisation.method != "allreduce" and any(replica.partners for replica in plan.replicas):
        what = "a checkpoint of tensor-parallel groups that train without a barrier"
        raise _unsupported(what, "synchronisation.method", "leave '--checkpoint' out")


def _check_effects(scenario: Scenario, compute: ComputeMode) -> None:
    """Raise `InputError` for effects on compute that a run does not have.

    The launch overhead of kernels is included in the plan's times. Paced compute has all other effects except blocking
    transfers; real compute can only be made slower.
    """
    effects = scenario.effects.compute
    if effects.transfers_block:
        raise _unsupported("transfers that block compute", "effects.compute.transfers_block", "remove the field")
    if compute == "paced":
        return
    if effects.jitter:
        raise _unsupported("jitter of real compute", "effects.compute.jitter", "remove the field")
    for number, straggler in enumerate(effects.stragglers):
        if straggler.factor < 1:
            raise _cannot_be_faster(straggler.device, f"stragglers[{number}].factor", "a factor of 1 or more")
    for number, slowdown in enumerate(effects.slowdowns):
        if max(slowdown.speed) > 1:
            raise _cannot_be_faster(slowdown.device, f"slowdowns[{number}].speed", "speeds of 1 or less")


def _cannot_be_faster(device: str, where: str, valid: str) -> InputError:
    return InputError(
        f"device '{device}' would have to compute faster than it does",
        where=f"effects.compute.{where}",
        valid=f"give {valid}, or choose '--compute paced'",
    )


def _check_packets(plan: Plan, scenario: Scenario) -> None:
    """Raise `InputError` for packet loss or jitter, since the shaper delays whole messages and has no packets."""
    for link in used_links(plan, scenario):
        given = [name for name, value in (("loss", link.loss), ("jitter", link.jitter_s)) if value]
        if given:
            raise InputError(
                f"the emulator 'shaper' cannot emulate {' and '.join(given)}, which link {link.name} has",
                where=f"cluster.links[{scenario.cluster.links.index(link)}].{given[0]}",
                valid="use the emulator 'relay', or remove them from the link",
            )


def _check_noise_scale(plan: Plan) -> None:
    if plan.synchronisation.method != "allreduce" or any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        raise _unsupported(
            "the noise scale of a pipeline of several stages",
            "training.noise_scale",
            "run a plan of the strategy 'ddp'",
        )
    if len(plan.replicas) < 2:
        raise InputError(
            "the noise scale cannot be measured on a single device",
            where="training.noise_scale",
            valid="give the plan at least two devices, whose gradients are compared",
        )


def _unsupported(what: str, where: str, valid: str) -> InputError:
    return InputError(f"{what} cannot be run yet", where=where, valid=f"{valid}; {_SIMULATE}")


# The relay's largest rate in bits per second, summed over all links, measured on one core; see docs/executor.md.
CARRIED_BPS = 1e9

_NAMED = 3


def too_fast(plan: Plan, scenario: Scenario, compute: ComputeMode) -> str | None:
    """Return a warning that names the plan's links that are faster than the relay; None if there are none."""
    pairs = dict.fromkeys(communicating_pairs(plan, scenario))
    if compute == "paced":
        # Paced runs time messages over links of their own, and count those inside a group as compute.
        groups = [set(replica.devices) for replica in plan.replicas if replica.partners]
        sent = (pair for pair in pairs if not any(group.issuperset(pair) for group in groups))
        pairs = dict.fromkeys(pair for pair in sent if own_link(scenario, *pair) is None)
    carried = dict.fromkeys(link for pair in pairs for link in scenario.cluster.path(*pair))
    fast = [link for link in carried if _peak_bps(link) > CARRIED_BPS]
    if not fast:
        return None
    named = ", ".join(f"{link.name} ({_rate(_peak_bps(link))})" for link in fast[:_NAMED])
    more = f" and {len(fast) - _NAMED} more" if len(fast) > _NAMED else ""
    return (
        f"the relay carries about {CARRIED_BPS / 1e6:.0f} Mbit/s, over all links together: "
        f"{named}{more} can be slower in this run than in the scenario"
    )


def _peak_bps(link: Link) -> float:
    return link.bandwidth_bps if link.trace is None else float(link.trace.bandwidth_bps.max())


def _rate(bandwidth_bps: float) -> str:
    return f"{bandwidth_bps / 1e6:g} Mbit/s" if bandwidth_bps < inf else "unlimited"
