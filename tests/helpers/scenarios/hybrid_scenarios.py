"""Random small scenarios of unlike devices on unlike links, for planners of hybrid pipelines."""

from dataclasses import replace

from hypothesis import strategies as st

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training
from tests.helpers.scenarios.builders import GIB


@st.composite
def unlike_scenarios(draw: st.DrawFn, most_devices: int = 4, most_layers: int = 4) -> Scenario:
    """Times that are not linear in samples, a link of its own for every ordered pair, memory that may not do."""
    devices = draw(st.integers(1, most_devices))
    kinds = [f"kind-{index}" for index in range(draw(st.integers(1, 2)))]
    times_s = st.floats(1e-3, 5)

    def table() -> TimeTable:
        rows = [(each := draw(times_s), each + draw(times_s)) for _ in range(3)]
        return TimeTable((1, 3), *rows)

    layers = tuple(
        LayerProfile(
            f"layer-{index}",
            draw(st.integers(0, 10_000)),
            draw(st.integers(0, 10_000)),
            draw(st.integers(0, 3_000)),
            {kind: table() for kind in kinds},
        )
        for index in range(draw(st.integers(1, most_layers)))
    )
    memories = st.one_of(st.just(GIB), st.integers(10_000, 100_000))
    cluster_devices = tuple(
        Device(f"device-{index}", draw(st.sampled_from(kinds)), "lan", draw(memories)) for index in range(devices)
    )
    links = tuple(
        Link(f"device-{a}", f"device-{b}", draw(st.sampled_from([1e4, 1e5, 1e6])), 0.0)
        for a in range(devices)
        for b in range(devices)
        if a != b
    )
    training = Training(draw(st.integers(1, 12)), draw(st.integers(1, 4)), Optimizer("momentum"))
    return Scenario("unlike", Cluster(cluster_devices, links), ModelProfile("unlike", layers), training)


def roomy(scenario: Scenario) -> Scenario:
    """The scenario with a GiB on every device."""
    devices = tuple(replace(device, memory_bytes=GIB) for device in scenario.cluster.devices)
    return replace(scenario, cluster=Cluster(devices, scenario.cluster.links))
