"""Scenarios with pools of alike devices, for tests of the search over many devices."""

from dataclasses import replace

from hypothesis import strategies as st

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training


@st.composite
def pool_scenarios(draw: st.DrawFn, least: int = 4, most: int = 24) -> Scenario:
    """One to three pools in regions of their own, hosts of two, any speeds and links; profiled for degree 2 as well."""
    kinds = [f"kind-{index}" for index in range(draw(st.integers(1, 3)))]
    sizes = [2 * draw(st.integers(max(1, least // 2 // len(kinds)), most // 2 // len(kinds))) for _ in kinds]
    speed = {kind: draw(st.floats(0.5, 5)) for kind in kinds}
    count = draw(st.integers(2, 8))
    layers = tuple(
        LayerProfile(
            f"layer-{index}",
            draw(st.integers(0, 10**6)),
            draw(st.integers(0, 10**5)),
            draw(st.integers(0, 10**5)),
            {kind: _table(draw(st.floats(1e-3, 1e-2)) * factor) for kind, factor in speed.items()},
        )
        for index in range(count)
    )
    shards = tuple(_half(layer) for layer in layers)
    model = ModelProfile("model", layers, {2: ModelProfile("model", shards)})
    memory_bytes = draw(st.sampled_from([20 * 10**6, 100 * 10**6, 10**9]))
    devices = tuple(
        Device(f"{kind}-{number}", kind, f"region-{kind}", memory_bytes, host=f"host-{kind}-{number // 2}")
        for kind, size in zip(kinds, sizes, strict=True)
        for number in range(size)
    )
    inside = [Link(f"region-{kind}", f"region-{kind}", draw(st.sampled_from([1e10, 1e11])), 1e-5) for kind in kinds]
    between = [
        Link(
            f"region-{one}", f"region-{other}", draw(st.sampled_from([1e8, 1e10])), draw(st.sampled_from([1e-4, 2e-2]))
        )
        for one in kinds
        for other in kinds
        if one != other
    ]
    training = Training(draw(st.integers(8, 96)), optimizer=Optimizer("adamw"))
    return Scenario("pools", Cluster(devices, (*inside, *between)), model, training)


def _table(time_s: float) -> TimeTable:
    # A part of the time does not depend on the number of samples, as on real devices.
    rows = tuple(time_s * (0.5 + 0.5 * samples) for samples in (1, 64))
    return TimeTable((1, 64), rows, rows, rows)


def _half(layer: LayerProfile) -> LayerProfile:
    times = {
        kind: replace(
            table,
            forward_s=tuple(0.6 * time for time in table.forward_s),
            backward_input_s=tuple(0.6 * time for time in table.backward_input_s),
            backward_weight_s=tuple(0.6 * time for time in table.backward_weight_s),
        )
        for kind, table in layer.times.items()
    }
    return replace(
        layer,
        parameter_bytes=layer.parameter_bytes // 2,
        activation_bytes=layer.activation_bytes // 2,
        times=times,
    )
