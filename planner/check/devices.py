"""Every device of a plan exists and works for one worker; tensor-parallel groups are alike and stand in one host."""

from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.cluster import Cluster
from traces.common.errors import InputError
from traces.common.names import find_by_name

# Shares are relative; beyond this their sum loses the small ones.
LARGEST_SHARE = 1e9


def check_devices(plan: Plan, cluster: Cluster) -> None:
    """Refuse a plan that names devices that are not there, or one of them two times.

    Stages of a pipeline on exactly the same replicas are one worker's: this is how a device holds several stages.

    Raises:
        InputError: With the place of the device.
    """
    seen: dict[str, str] = {}
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            raise InputError("the pipeline has no stages", where=f"pipelines[{p}]", valid="give at least one")
        workers: dict[tuple[tuple[str, ...], ...], tuple[str, Stage]] = {}
        for s, stage in enumerate(pipeline.stages):
            where = f"pipelines[{p}].stages[{s}]"
            if not stage.replicas:
                raise InputError("the stage has no replicas", where=where, valid="give at least one")
            for r, replica in enumerate(stage.replicas):
                _check_replica(replica, cluster, f"{where}.replicas[{r}]")
            groups = tuple(replica.devices for replica in stage.replicas)
            if groups in workers:
                _check_same_shares(stage, *workers[groups], where)
                continue
            workers[groups] = (where, stage)
            for r, replica in enumerate(stage.replicas):
                _claim(replica, f"{where}.replicas[{r}]", seen)


def _claim(replica: Replica, where: str, seen: dict[str, str]) -> None:
    """Note where the devices of a replica work, none of which may work anywhere yet."""
    for position, device in enumerate(replica.devices):
        if device in seen:
            raise InputError(
                f"device '{device}' is used twice",
                where=f"{where}.device" if position == 0 else f"{where}.partners[{position - 1}]",
                valid=f"it already works in {seen[device]}; stages of one pipeline share all of their devices, in the "
                "same order, or none",
            )
        seen[device] = where


def _check_same_shares(stage: Stage, other_where: str, other: Stage, where: str) -> None:
    shares, others = ([replica.share for replica in each.replicas] for each in (stage, other))
    if shares != others:
        raise InputError(
            f"the stage's shares are {', '.join(f'{share:g}' for share in shares)}",
            where=f"{where}.replicas",
            valid=f"it is on the same devices as {other_where}, so it takes the same samples: "
            f"{', '.join(f'{share:g}' for share in others)}",
        )


def _check_replica(replica: Replica, cluster: Cluster, where: str) -> None:
    leader = find_by_name(replica.device, cluster.by_name, "device", where=f"{where}.device")
    if not 0 < replica.share <= LARGEST_SHARE:
        raise InputError(
            f"share {replica.share:g}", where=f"{where}.share", valid="a share is a number above zero, 1e9 at most"
        )
    for number, name in enumerate(replica.partners):
        place = f"{where}.partners[{number}]"
        partner = find_by_name(name, cluster.by_name, "device", where=place)
        if partner.machine != leader.machine:
            raise InputError(
                f"device '{name}' is in host '{partner.machine}', device '{leader.name}' in '{leader.machine}'",
                where=place,
                valid="the devices of a tensor-parallel group are in one host",
            )
        if partner.kind != leader.kind:
            raise InputError(
                f"device '{name}' is a {partner.kind}, device '{leader.name}' a {leader.kind}",
                where=place,
                valid="the devices of a tensor-parallel group are of one kind",
            )
