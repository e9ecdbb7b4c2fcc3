"""Random small scenarios of unlike devices, for searches to be tried on."""

from random import Random

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training


def unlike_scenario(seed: int, devices: tuple[int, int], layers: tuple[int, int], most_samples: int = 12) -> Scenario:
    """Devices whose speeds differ by a factor of ten at most, a link of its own for each ordered pair.

    Memory goes from what hardly holds the model to plenty, parameters from hardly any to such whose sums take longer
    than compute; small microbatches may cost more for each sample than large ones.
    """
    random = Random(seed)
    count, depth = random.randint(*devices), random.randint(*layers)
    speeds = [10 ** random.uniform(0, random.choice([0.0, 0.5, 1.0])) for _ in range(count)]
    fixed = random.choice([0.0, 0.0, 0.5, 2.0])
    parameter_bytes = random.choice([400, 4_000, 40_000, 400_000, 4_000_000])
    output_bytes = random.choice([100, 10_000, 100_000, 1_000_000])
    activation_bytes = random.choice([1_000, 100_000, 3_000_000])
    made = tuple(
        LayerProfile(
            f"layer-{index}",
            random.randint(1, 8) * parameter_bytes,
            random.randint(1, 4) * output_bytes,
            activation_bytes,
            _times(random.uniform(2e-3, 2e-2), fixed, speeds),
        )
        for index in range(depth)
    )
    whole_bytes = sum(2 * layer.parameter_bytes + layer.activation_bytes for layer in made)
    room = [random.choice([0.6, 1.2, 3.0, 50.0]) for _ in range(count)]
    slowest, worst_s = random.uniform(6, 9), random.choice([0.0, 1e-3, 1e-2, 5e-2])
    cluster = Cluster(
        tuple(Device(f"device-{i}", f"kind-{i}", f"region-{i}", round(room[i] * whole_bytes)) for i in range(count)),
        tuple(
            Link(f"region-{a}", f"region-{b}", 10 ** random.uniform(slowest, 9), random.uniform(0, worst_s))
            for a in range(count)
            for b in range(count)
            if a != b
        ),
    )
    training = Training(random.randint(1, most_samples), optimizer=Optimizer("sgd"))
    return Scenario("unlike", cluster, ModelProfile("unlike", made), training)


def _times(seconds: float, fixed: float, speeds: list[float]) -> dict[str, TimeTable]:
    """Twice as long backward as forward; a call takes as long as so many samples more."""
    rows = (1, 2, 64)
    tables = {}
    for index, speed in enumerate(speeds):
        times = tuple(seconds * (fixed + row) / speed for row in rows)
        tables[f"kind-{index}"] = TimeTable(rows, times, times, times)
    return tables
