"""The trainings that are struck: a small GPT on four devices in two or three places."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from experiments.benches.faults.moves import Moves
from planner.files.scenario import read_scenario
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import ModelCode, Scenario

# Steps of a run, some seconds; steps from one change of plan to the next, and from one checkpoint to the next.
STEPS, MOVE_EVERY, CHECKPOINT_EVERY = 120, 7, 10

DEVICES = ("device-0", "device-1", "device-2", "device-3")
# The places of the devices: regions on one machine, or hosts in network namespaces of their own.
PLACES = {2: ("north", "north", "south", "south"), 3: ("north", "west", "west", "south")}

LINK = {"bandwidth": "200 Mbit/s", "latency": "5 ms"}
_LOCAL = {"bandwidth": "1 Gbit/s", "latency": "0.1 ms"}

_MODEL = ModelCode(
    Path(__file__).with_name("model.py"),
    {"vocabulary": 32, "width": 32, "heads": 2, "blocks": 4, "length": 16},
)
_GLOBAL_BATCH, _LAYERS = 12, 6

# Stages of a plan as (first layer, layer after the last, devices) for each pipeline: the plan at the start, and the
# other one of the two between which a policy changes. The line has a device to spare, which comes in and goes again.
_Stages = Sequence[tuple[int, int, Sequence[int]]]
SHAPES: dict[str, tuple[Sequence[_Stages], Sequence[_Stages]]] = {
    "replicas": (
        [[(0, 2, [0]), (2, 4, [1, 2]), (4, 6, [3])]],
        [[(0, 1, [0]), (1, 4, [1, 2]), (4, 6, [3])]],
    ),
    "line": (
        [[(0, 2, [0]), (2, 4, [1]), (4, 6, [2])]],
        [[(0, 3, [0]), (3, 4, [3]), (4, 6, [2])]],
    ),
    "pipelines": (
        [[(0, 3, [0]), (3, 6, [1])], [(0, 3, [2]), (3, 6, [3])]],
        [[(0, 2, [0]), (2, 6, [1])], [(0, 4, [2]), (4, 6, [3])]],
    ),
}

# A policy that waits for lost devices, one that also changes plans all the time, and one that goes on without them.
POLICIES = ("none", "moves", "asteroid-replay")


@dataclass(frozen=True, slots=True)
class Case:
    """A training.

    Attributes:
        shape: The plans, a key of `SHAPES`.
        policy: One of `POLICIES`.
        optimizer: Name of the update rule.
        where: ``shaper`` or ``relay``, by which links are emulated on one host, or ``hosts`` in their own namespaces.
        places: Number of regions or hosts, a key of `PLACES`.
        steps: Number of training steps.
    """

    shape: str
    policy: str
    optimizer: str
    where: str
    places: int
    steps: int = STEPS

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, the head first; empty on one host."""
        return tuple(map(_host, dict.fromkeys(PLACES[self.places]))) if self.where == "hosts" else ()

    @property
    def ranks(self) -> range:
        """The ranks of the job."""
        return range(3 if (self.shape, self.policy) == ("line", "none") else 4)

    @property
    def plan(self) -> Plan:
        """The plan at the start."""
        return _plan(SHAPES[self.shape][0])

    @property
    def moves(self) -> Moves:
        """The changes of plan that the policy makes in any case."""
        if self.policy != "moves":
            return ()
        plans = [_plan(each) for each in SHAPES[self.shape]]
        return [(step, plans[step // MOVE_EVERY % 2]) for step in range(0, self.steps, MOVE_EVERY)]

    def write_scenario(self, path: Path, cuts: Sequence[tuple[float, float]] = ()) -> Scenario:
        """Write the scenario's file and return the scenario; ``cuts`` are the run seconds in which no link carries."""
        places = dict.fromkeys(PLACES[self.places])
        between = [(one, other) for one in places for other in places if one < other]
        document = {
            "name": "faults",
            "cluster": {
                "kinds": {"cpu": {"peak": "50 GFLOP/s", "memory": "4 GiB", "memory_bandwidth": "20 GB/s"}},
                "devices": [
                    {"name": name, "kind": "cpu", "region": place, **({"host": _host(place)} if self.hosts else {})}
                    for name, place in zip(DEVICES, PLACES[self.places], strict=True)
                ],
                "links": [
                    *({"inside": place, **_LOCAL} for place in places),
                    *({"between": list(pair), **LINK} for pair in between),
                ],
            },
            "model": _model(),
            "training": {
                "global_batch": _GLOBAL_BATCH,
                "microbatch": 4,
                "optimizer": {"name": self.optimizer, "learning_rate": 0.002 if self.optimizer == "adamw" else 0.05},
            },
            "faults": [
                {"link": f"{source}->{target}", "out": f"{start_s} s", "back": f"{end_s} s"}
                for start_s, end_s in cuts
                for pair in between
                for source, target in (pair, pair[::-1])
            ],
        }
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return read_scenario(path)


def _host(region: str) -> str:
    return f"host-{region}"


@cache
def _model() -> dict[str, Any]:
    # Loads torch, which only this bench needs.
    from executor.training.models.loading import load_with_sizes

    passes = ("forward", "backward_input", "backward_weight")
    times = {"samples": [1], **{name: ["1 ms"] for name in passes}}
    return {
        "name": "gpt",
        "code": str(_MODEL.path),
        "arguments": dict(_MODEL.arguments),
        "layers": [
            {
                "name": f"layer-{index}",
                "parameters": f"{size.parameter_bytes} B",
                "output": f"{size.output.size_bytes} B",
                "activation": "1 kB",
                "times": {"cpu": times},
            }
            for index, size in enumerate(load_with_sizes(_MODEL, seed=0).sizes)
        ],
    }


def _plan(pipelines: Sequence[_Stages]) -> Plan:
    microbatches = (4, 4, 4) if len(pipelines) == 1 else (3, 3)
    made = tuple(
        Pipeline(
            tuple(
                Stage(first, end, tuple(Replica(DEVICES[number]) for number in numbers), len(stages) - index)
                for index, (first, end, numbers) in enumerate(stages)
            ),
            microbatches,
        )
        for stages in pipelines
    )
    return Plan("faults", "gpt", "asteroid", "1f1b", made)
