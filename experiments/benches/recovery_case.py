"""What is trained where the bench of recovery kills ranks: the example GPT, on every kind of rank."""

from pathlib import Path

from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Optimizer, Scenario, Training

# Each device of the plan, and what kind of rank it is.
KINDS = {
    "first": "the first stage",
    "middle": "a middle stage",
    "replica-0": "a replica",
    "replica-1": "a replica",
    "last": "the last stage",
}

MODEL = {"vocabulary": 64, "width": 64, "heads": 4, "blocks": 6, "length": 32}
_MODEL_FILE = Path(__file__).parents[1] / "models" / "gpt.py"
GLOBAL_BATCH = 16
MICROBATCHES = 4
LEARNING_RATE = 0.05

_LAYERS = MODEL["blocks"] + 2
_STAGES = ((0, 2, ("first",)), (2, 4, ("middle",)), (4, 6, ("replica-0", "replica-1")), (6, _LAYERS, ("last",)))

STAGES = len(_STAGES)


def recovery_case() -> tuple[Scenario, Plan]:
    """Return five devices of one region with a pipeline of four stages, whose third has two replicas."""
    from executor.training.models.loading import load_with_sizes

    code = ModelCode(_MODEL_FILE, MODEL)
    sizes = load_with_sizes(code, seed=0).sizes
    # By what it plans with when a device is gone; all devices are alike.
    table = TimeTable((1,), (0.002,), (0.002,), (0.002,))
    layers = tuple(
        LayerProfile(f"layer-{index}", size.parameter_bytes, size.output.size_bytes, 1000, {"cpu": table})
        for index, size in enumerate(sizes)
    )
    cluster = Cluster(tuple(Device(name, "cpu", "here", 2**32) for name in KINDS), (Link("here", "here", 1e9, 0.0),))
    training = Training(GLOBAL_BATCH, optimizer=Optimizer("momentum", learning_rate=LEARNING_RATE, momentum=0.9))
    scenario = Scenario("recovery", cluster, ModelProfile("gpt", layers), training, code)
    stages = tuple(
        Stage(first, end, tuple(Replica(name) for name in names), len(_STAGES) - index)
        for index, (first, end, names) in enumerate(_STAGES)
    )
    pipeline = Pipeline(stages, (GLOBAL_BATCH // MICROBATCHES,) * MICROBATCHES)
    return scenario, Plan(scenario.name, scenario.model.name, "asteroid", "1f1b", (pipeline,))
