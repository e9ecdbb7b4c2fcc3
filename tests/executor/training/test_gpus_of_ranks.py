"""Each rank of a host takes a GPU of its own, of the kind that the scenario gives; a host with too few is refused."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.core.hosts import ranks_by_host
from executor.core.job import JobFolder, RunConfig
from executor.rank.context import RankConfig
from executor.training.device import check_gpu_memory, check_gpus, device_name, gpus_of_ranks, is_kind
from planner.scenario.cluster import Cluster, Device
from planner.scenario.datasheet import DATASHEET, is_gpu
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError

# What the driver calls a GPU of each of these kinds.
NAMES = {"t4": "Tesla T4", "a100-40": "NVIDIA A100-SXM4-40GB", "l4": "NVIDIA L4"}
CPUS = ("cpu", "cpu-epyc", "raspberry-pi-4")

kinds_of_a_host = st.lists(st.sampled_from([*NAMES, *CPUS, "my-own"]), max_size=10)


@given(kinds_of_a_host, st.randoms(use_true_random=False), st.integers(0, 2))
def test_each_rank_has_its_own_gpu_of_its_kind(kinds: list[str], random: "st.random.Random", spare: int) -> None:
    """In any order of ranks and GPUs, beside ranks on the CPU, if the host has the GPUs that a deployment asks for."""
    names = [NAMES.get(kind, "NVIDIA GeForce RTX 3060") for kind in kinds if is_gpu(kind)]
    names += ["Tesla T4"] * spare
    random.shuffle(names)
    check_gpus([Device(f"device-{place}", kind, "here", 1) for place, kind in enumerate(kinds)], names)
    found = gpus_of_ranks(kinds, names)
    assert [index is None for index in found] == [not is_gpu(kind) for kind in kinds]
    taken = Counter(index for index in found if index is not None)
    assert set(taken.values()) <= {1}
    for place, kind in enumerate(kinds):
        if kind in NAMES:
            assert is_kind(kind, device_name(kinds, place, names))


@given(kinds_of_a_host, st.lists(st.sampled_from([*NAMES.values(), "NVIDIA GeForce RTX 3060"]), max_size=6))
def test_any_host_is_used_evenly_or_refused(kinds: list[str], names: list[str]) -> None:
    """Ranks share a GPU only if there are too few; where kinds of the datasheet need them, the host is refused."""
    found = [index for index in gpus_of_ranks(kinds, names) if index is not None]
    on_gpu = sum(map(is_gpu, kinds)) if names else 0
    assert len(found) == on_gpu
    assert len(set(found)) == min(on_gpu, len(names))
    needing = sum(kind in DATASHEET and is_gpu(kind) for kind in kinds)
    devices = [Device(f"device-{place}", kind, "here", 1) for place, kind in enumerate(kinds)]
    if needing <= len(names):
        check_gpus(devices, names)
        return
    with pytest.raises(InputError, match=f"{needing} in all, but torch finds {len(names) or 'none'}"):
        check_gpus(devices, names)


def test_the_refusal_is_one_line_with_names_kinds_and_what_was_found() -> None:
    devices = [Device(name, kind, "here", 1) for name, kind in (("a", "a100-40"), ("c", "cpu"), ("b", "t4"))]
    with pytest.raises(InputError) as refused:
        check_gpus(devices, ["NVIDIA A100-SXM4-40GB"])
    assert str(refused.value) == (
        "--compute real: a (a100-40), b (t4) need a GPU each on this host, 2 in all, but torch finds 1 "
        "(NVIDIA A100-SXM4-40GB); ask the scheduler for as many, or give '--on-this-device' to let ranks share a GPU"
    )


def test_a_gpu_with_much_less_memory_than_the_scenario_says_is_refused() -> None:
    device = Device("a", "a100-80", "here", 80 * 2**30)
    check_gpu_memory(device, "NVIDIA A100-SXM4-80GB", int(79.1 * 2**30))
    with pytest.raises(InputError) as refused:
        check_gpu_memory(device, "NVIDIA A100-SXM4-40GB", int(39.5 * 2**30))
    assert str(refused.value).startswith(
        "--compute real: the scenario gives device 'a' 80.00 GiB of memory, but NVIDIA A100-SXM4-40GB has 39.50 GiB "
    )


def test_a_rank_on_the_cpu_takes_no_gpu_from_the_others() -> None:
    """By their numbers on the host, ranks 0 and 2 would both have taken the first of two GPUs."""
    assert gpus_of_ranks(["t4", "cpu", "t4"], ["Tesla T4", "Tesla T4"]) == [0, None, 1]
    assert gpus_of_ranks(["t4", "a100-40"], [NAMES["a100-40"], NAMES["t4"]]) == [1, 0]


@given(st.lists(st.sampled_from(["north", "south", ""]), min_size=1, max_size=8), st.booleans())
def test_ranks_are_counted_on_each_host_as_launchers_count_them(hosts: list[str], spread: bool) -> None:
    """All launchers start a host's ranks in the order of `ranks_by_host`, whose index is LOCAL_RANK."""
    scenario = chain_scenario([1e-3], [1e-3])
    plan = chain_plan(scenario)
    devices = tuple(Device(f"device-{place}", "t4", "here", 1, host=host) for place, host in enumerate(hosts))
    cluster = Cluster(devices, ())
    names = tuple(device.name for device in devices)
    by_host = ranks_by_host(cluster, names) if spread else {"here": tuple(range(len(names)))}
    run = RunConfig("real", 1, "none", adapts=False, spread=spread)
    for ranks in by_host.values():
        for place, rank in enumerate(ranks):
            own = type(scenario)(scenario.name, cluster, scenario.model, scenario.training)
            config = RankConfig(JobFolder(Path("absent")), rank, own, plan, run, names)
            assert config.place == place
            assert [device.name for device in config.on_host] == [names[each] for each in ranks]
