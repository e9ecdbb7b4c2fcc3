"""A thousand devices in sixteen regions whose links sway every second: a scenario of the size that people plan for."""

import numpy as np

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Optimizer, Scenario, Training
from traces.trace import LinkTrace

REGIONS = 16
DEVICES = 1024
LAYERS = 32
TRACE_S = 3600

# Of a transformer layer of 4096 units at 2048 tokens a sample in fp32, and of two kinds of device.
PARAMETER_BYTES = 12 * 4096**2 * 4
OUTPUT_BYTES = 2048 * 4096 * 4
FORWARD_S = {"fast": 0.08, "slow": 0.11}


def wide_area_scenario(
    seed: int = 0, *, devices: int = DEVICES, regions: int = REGIONS, global_batch: int = 1024
) -> Scenario:
    """Return the scenario; devices are listed region by region in turn, so that uniform pipelines cross all regions.

    Between any two regions 2 to 10 Gbit/s that vary by a quarter from second to second, 5 to 60 ms one way; inside
    a region 400 Gbit/s for all together.
    """
    random = np.random.default_rng(seed)
    gpus = tuple(
        Device(f"gpu-{index}", "fast" if index % 3 else "slow", f"region-{index % regions}", 80 * 2**30, 2.0)
        for index in range(devices)
    )
    links = []
    for a in range(regions):
        for b in range(regions):
            if a == b:
                links.append(Link(f"region-{a}", f"region-{a}", 400e9, 50e-6))
                continue
            mean_bps, latency_s = random.uniform(2e9, 10e9), random.uniform(0.005, 0.06)
            rates = mean_bps * np.exp(0.25 * random.standard_normal(TRACE_S))
            trace = LinkTrace(np.arange(TRACE_S, dtype=np.float64), rates, float(TRACE_S))
            links.append(Link(f"region-{a}", f"region-{b}", trace.mean_bps, latency_s, trace, price_per_gb=0.02))
    times = {kind: TimeTable((1,), (each,), (each,), (each,)) for kind, each in FORWARD_S.items()}
    layers = tuple(
        LayerProfile(f"layer-{index}", PARAMETER_BYTES, OUTPUT_BYTES, 20 * OUTPUT_BYTES, times)
        for index in range(LAYERS)
    )
    training = Training(global_batch, microbatch=1, optimizer=Optimizer("adamw"))
    return Scenario("wide-area", Cluster(gpus, tuple(links)), ModelProfile("transformer", layers), training)
