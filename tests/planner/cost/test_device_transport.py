"""Which transport carries tensors between two devices, and the rates of their copies."""

from dataclasses import replace

import pytest

from planner.cost.device_transport import GLOO, NCCL, boundary_transport, copy_seconds_per_byte, group_transport
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.cluster import Cluster
from planner.scenario.datasheet import DATASHEET, has_nccl, host_link_bps
from planner.scenario.effects import ComputeEffects, Effects, TransportEffects
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from traces.common.errors import InputError


def case(kinds: list[str], regions: list[str]) -> tuple[Scenario, Plan]:
    """A pipeline with a stage for each device."""
    scenario = mesh_scenario(len(kinds), [1.0] * len(kinds), [1.0] * len(kinds), regions=regions)
    devices = tuple(replace(each, kind=kind) for each, kind in zip(scenario.cluster.devices, kinds, strict=True))
    plan = layered_plan(scenario, [([(index + 1, 1, 1) for index in range(len(kinds))], [1])])
    return replace(scenario, cluster=Cluster(devices, scenario.cluster.links)), plan


def between(kinds: list[str], regions: list[str], transport: TransportEffects) -> str:
    scenario, plan = case(kinds, regions)
    scenario = replace(scenario, effects=Effects(transport=transport))
    found = boundary_transport(plan, scenario, "device-0", "device-1")
    assert boundary_transport(plan, scenario, "device-1", "device-0") == found
    assert group_transport(scenario, ["device-0", "device-1"]) == found
    return found


@pytest.mark.parametrize(
    ("kinds", "regions", "nccl", "expected"),
    [
        (["a100-40", "a100-40"], ["a", "a"], True, NCCL),
        (["h100-80", "l4"], ["a", "a"], True, NCCL),
        (["a100-40", "a100-40"], ["a", "b"], True, GLOO),
        (["a100-40", "a100-40"], ["a", "a"], False, GLOO),
        (["a100-40", "cpu"], ["a", "a"], True, GLOO),
        (["cpu", "cpu"], ["a", "a"], True, GLOO),
        (["a100-40", "jetson-tx2"], ["a", "a"], True, GLOO),
        # Of a user's own kind nothing is known: it may be a part of a GPU, which two ranks share.
        (["mine", "mine"], ["a", "a"], True, GLOO),
    ],
)
def test_nccl_carries_tensors_between_gpus_that_have_it_in_one_region(
    kinds: list[str], regions: list[str], nccl: bool, expected: str
) -> None:
    assert between(kinds, regions, TransportEffects(nccl=nccl)) == expected


def test_devices_of_tensor_parallel_groups_use_nccl_inside_their_group_only() -> None:
    scenario, plan = case(["a100-40"] * 4, ["a"] * 4)
    stages = (
        Stage(0, 1, (Replica("device-0", 1.0, ("device-1",)),), 1),
        Stage(1, 2, (Replica("device-2"),), 1),
        Stage(2, 4, (Replica("device-3"),), 1),
    )
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))
    assert group_transport(scenario, ["device-0", "device-1"]) == NCCL
    assert boundary_transport(plan, scenario, "device-0", "device-2") == GLOO
    assert boundary_transport(plan, scenario, "device-2", "device-3") == NCCL


def test_copies_take_the_time_of_each_ends_pcie_and_none_with_nccl() -> None:
    scenario, plan = case(["a100-40", "h100-80", "cpu"], ["a", "b", "b"])
    counted = replace(scenario, effects=Effects(transport=TransportEffects(copies=True)))
    assert copy_seconds_per_byte(plan, counted, "device-0", "device-1") == (1 / 31.5e9, 1 / 63e9)
    assert copy_seconds_per_byte(plan, counted, "device-1", "device-2") == (1 / 63e9, 0.0)
    given = replace(scenario, effects=Effects(transport=TransportEffects(copies=True, copy_bps=8e9)))
    assert copy_seconds_per_byte(plan, given, "device-0", "device-1") == (1e-9, 1e-9)
    assert copy_seconds_per_byte(plan, scenario, "device-0", "device-1") == (0.0, 0.0)
    same, plan = case(["a100-40", "a100-40"], ["a", "a"])
    same = replace(same, effects=Effects(transport=TransportEffects(copies=True)))
    assert copy_seconds_per_byte(plan, same, "device-0", "device-1") == (0.0, 0.0)


def test_each_kind_of_gpu_reaches_its_host_or_shares_its_memory() -> None:
    for kind in DATASHEET:
        shares = kind.startswith(("jetson", "raspberry-pi"))
        assert (host_link_bps(kind) == float("inf")) == shares == (not has_nccl(kind))


def test_copies_beside_compute_exclude_transfers_that_block_it() -> None:
    with pytest.raises(InputError, match="one stream for compute and transfers"):
        Effects(compute=ComputeEffects(transfers_block=True), transport=TransportEffects(copies=True))
    with pytest.raises(InputError, match="copies at 0 bit/s"):
        TransportEffects(copies=True, copy_bps=0.0)
