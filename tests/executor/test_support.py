"""What only the simulator can do is refused before a process starts, through the real command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from executor.core.job import ComputeMode, Emulator
from executor.transport.device_pairs import check_nccl
from executor.validate import check_supported
from planner.files.plan import write_plan
from planner.files.resolved_scenario import write_resolved_scenario
from planner.plan.actions import parse_action
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.cluster import Cluster, Link
from planner.scenario.effects import ComputeEffects, Effects, Slowdown, Straggler, TransportEffects
from planner.scenario.faults import Absence, LinkOutage
from planner.scenario.scenario import ModelCode, Scenario
from tests.helpers.processes.command import ropebridge
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError

SCENARIO = chain_scenario([1e-3, 1e-3], [1e-3, 1e-3], global_batch=2)
PLAN = chain_plan(SCENARIO)
CODE = ModelCode(Path("model.py"), {})
FOUR = chain_scenario([1e-3] * 4, [1e-3] * 4, global_batch=2)


def explicit(*orders: str) -> Plan:
    rows = tuple(tuple(parse_action(text) for text in order.split()) for order in orders)
    pipeline = replace(PLAN.pipelines[0], orders=rows)
    return replace(PLAN, schedule="explicit", pipelines=(pipeline,))


def on_one_device() -> Plan:
    stages = tuple(Stage(n, n + 1, (Replica("device-0"),), 1) for n in range(2))
    orders = tuple(parse_action(text) for text in ["0F0", "1F0", "1B0", "0B0"])
    return replace(PLAN, schedule="explicit", pipelines=(Pipeline(stages, (2,), (orders,)),))


def two_pipelines(how: Synchronisation, replicas: int = 1) -> Plan:
    names = iter(device.name for device in FOUR.cluster.devices)
    pipelines = tuple(
        Pipeline((Stage(0, 4, tuple(Replica(next(names)) for _ in range(replicas)), 1),), (1,)) for _ in range(2)
    )
    return replace(chain_plan(FOUR), pipelines=pipelines, synchronisation=how)


def outage(scenario: Scenario) -> Scenario:
    return replace(scenario, faults=(LinkOutage("region-0->region-1", 0.1, 0.2),))


def over(**described: float) -> Scenario:
    """The same over links that lose or delay packets."""
    links = tuple(replace(link, **described) for link in SCENARIO.cluster.links)
    return replace(SCENARIO, cluster=Cluster(SCENARIO.cluster.devices, links))


def with_effects(**effects: object) -> Scenario:
    return replace(SCENARIO, effects=replace(SCENARIO.effects, compute=ComputeEffects(**effects)))


NOISE = replace(SCENARIO, training=replace(SCENARIO.training, noise_scale=True))
DATA_PARALLEL = Pipeline((Stage(0, 2, (Replica("device-0"), Replica("device-1")), 1),), (2,))
ALONE = Pipeline((Stage(0, 2, (Replica("device-0"),), 1),), (2,))

REFUSED: dict[str, tuple[Plan, Scenario, ComputeMode, Emulator, str, str, str]] = {
    "a device that goes": (
        PLAN,
        replace(SCENARIO, faults=(Absence("device-0", 1.0, 2.0),)),
        "paced",
        "relay",
        "faults[0]",
        "a device that leaves or hangs would end this run",
        "add '--backup-every'",
    ),
    "an outage without the relay": (
        PLAN,
        outage(SCENARIO),
        "paced",
        "shaper",
        "faults[0]",
        "a link that is out can only be emulated by the relay",
        "add '--emulator relay'",
    ),
    "loss in the shaper": (
        PLAN,
        over(loss=0.01),
        "paced",
        "shaper",
        "cluster.links[0].loss",
        "'shaper' cannot emulate loss, which link region-0->region-1 has",
        "use the emulator 'relay', or remove them",
    ),
    "loss and jitter in the shaper": (
        PLAN,
        over(loss=0.01, jitter_s=0.001),
        "real",
        "shaper",
        "cluster.links[0].loss",
        "cannot emulate loss and jitter",
        "or remove them",
    ),
    "jitter in the shaper": (
        PLAN,
        over(jitter_s=0.001),
        "paced",
        "shaper",
        "cluster.links[0].jitter",
        "cannot emulate jitter",
        "use the emulator 'relay'",
    ),
    "jitter of real compute": (
        PLAN,
        with_effects(jitter=0.1),
        "real",
        "none",
        "effects.compute.jitter",
        "jitter of real compute cannot be run yet",
        "remove the field",
    ),
    "transfers that block": (
        PLAN,
        with_effects(transfers_block=True),
        "paced",
        "none",
        "effects.compute.transfers_block",
        "transfers that block compute",
        "remove the field",
    ),
    "a faster straggler": (
        PLAN,
        with_effects(stragglers=(Straggler("device-0", 0.5),)),
        "real",
        "none",
        "effects.compute.stragglers[0].factor",
        "device 'device-0' would have to compute faster than it does",
        "give a factor of 1 or more, or choose '--compute paced'",
    ),
    "a faster device": (
        PLAN,
        with_effects(slowdowns=(Slowdown("device-0", (0.0, 1.0), (1.0, 2.0)),)),
        "real",
        "none",
        "effects.compute.slowdowns[0].speed",
        "device 'device-0' would have to compute faster than it does",
        "give speeds of 1 or less",
    ),
    "noise of a pipeline": (
        PLAN,
        NOISE,
        "real",
        "none",
        "training.noise_scale",
        "the noise scale of a pipeline of several stages",
        "the strategy 'ddp'",
    ),
    "noise of one device": (
        replace(PLAN, pipelines=(ALONE,)),
        NOISE,
        "real",
        "none",
        "training.noise_scale",
        "the noise scale cannot be measured on a single device",
        "at least two devices",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run(case: str) -> None:
    plan, scenario, compute, emulator, where, problem, valid = REFUSED[case]
    with pytest.raises(InputError) as refused:
        check_supported(plan, scenario, compute, emulator)
    assert refused.value.where == where
    assert problem in str(refused.value)
    assert valid in str(refused.value)


def test_it_is_refused_in_one_line_before_a_process_starts(tmp_path: Path) -> None:
    write_resolved_scenario(replace(SCENARIO, faults=(Absence("device-0", 1.0, 2.0),)), tmp_path / "scenario.json")
    write_plan(PLAN, tmp_path / "plan.json")
    arguments = ["run", "scenario.json", "--plan", "plan.json", "--compute", "paced", "-o", "out"]
    done = ropebridge(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "would end this run; " in done.stderr
    assert "or use 'ropebridge simulate'" in done.stderr
    assert not (tmp_path / "out").exists()


def on_gpus(*, nccl: bool = True) -> Scenario:
    """The same devices as GPUs of one region, whose messages NCCL would carry."""
    devices = tuple(replace(each, kind="a100-40", region="here") for each in SCENARIO.cluster.devices)
    links = (Link("here", "here", 1e9, 0.0),)
    effects = Effects(transport=TransportEffects(nccl=nccl))
    return replace(SCENARIO, cluster=Cluster(devices, links), effects=effects, code=CODE)


@pytest.mark.parametrize(("emulator", "recovers"), [("shaper", False), ("none", True)])
def test_nccl_excludes_emulated_links_and_lost_ranks(emulator: Emulator, recovers: bool) -> None:
    with pytest.raises(InputError, match="NCCL carries messages between devices 'device-0' and 'device-1'") as refused:
        check_supported(PLAN, on_gpus(), "real", emulator, recovers=recovers)
    assert refused.value.where == ("--backup-every" if recovers else "--emulate-wan")
    assert "'effects: {transport: {nccl: false}}'" in str(refused.value)
    check_supported(PLAN, on_gpus(nccl=False), "real", emulator, recovers=recovers)
    check_supported(PLAN, on_gpus(), "real", emulator, recovers=recovers, on_this_device=True)
    check_supported(PLAN, on_gpus(), "paced", emulator, recovers=recovers)


def test_a_torch_without_nccl_is_refused_where_a_plan_needs_it() -> None:
    check_nccl(PLAN, SCENARIO, "device-0", is_available=False)
    check_nccl(PLAN, on_gpus(), "device-0", is_available=True)
    with pytest.raises(InputError, match="but torch has no NCCL here; install a torch with NCCL, or write"):
        check_nccl(PLAN, on_gpus(), "device-0", is_available=False)


@pytest.mark.parametrize("compute", ["paced", "real"])
@pytest.mark.parametrize(
    ("plan", "scenario", "emulator"),
    [
        pytest.param(PLAN, SCENARIO, "none", id="scheduled"),
        pytest.param(replace(PLAN, schedule="zb-h1"), SCENARIO, "shaper", id="split-backward"),
        pytest.param(explicit("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1 1W0"), SCENARIO, "none", id="explicit"),
        pytest.param(on_one_device(), SCENARIO, "none", id="several-stages-on-a-device"),
        pytest.param(replace(PLAN, order="dynamic"), SCENARIO, "none", id="dynamic"),
        pytest.param(replace(PLAN, connections=4, compression="int8"), SCENARIO, "relay", id="wide-area"),
        pytest.param(two_pipelines(Synchronisation(algorithm="tree"), replicas=2), FOUR, "none", id="tree"),
        pytest.param(
            two_pipelines(Synchronisation("asgd-ga", interval_steps=4), replicas=2), FOUR, "none", id="no-waiting"
        ),
        pytest.param(
            two_pipelines(Synchronisation("ma", interval_steps=4), replicas=2), FOUR, "none", id="averaging-replicas"
        ),
        pytest.param(PLAN, outage(SCENARIO), "relay", id="an-outage-with-the-relay"),
        pytest.param(PLAN, over(loss=0.01, jitter_s=0.001), "relay", id="packets-that-get-lost"),
        pytest.param(replace(PLAN, pipelines=(ALONE,)), over(loss=0.01), "shaper", id="a-lossy-link-nobody-uses"),
        pytest.param(PLAN, with_effects(launch_overhead_s=1e-4), "none", id="launches"),
        pytest.param(PLAN, with_effects(stragglers=(Straggler("device-0", 2.0),)), "none", id="straggler"),
        pytest.param(
            PLAN, with_effects(slowdowns=(Slowdown("device-0", (0.0, 1.0), (1.0, 0.5)),)), "none", id="slow-down"
        ),
        pytest.param(replace(PLAN, pipelines=(DATA_PARALLEL,)), NOISE, "none", id="noise-scale"),
        pytest.param(
            replace(PLAN, pipelines=(Pipeline((Stage(0, 2, (Replica("device-0", 1.0, ("device-1",)),), 1),), (2,)),)),
            replace(SCENARIO, model=replace(SCENARIO.model, sharded={2: SCENARIO.model})),
            "none",
            id="tensor-parallelism",
        ),
    ],
)
def test_what_can_be_run(plan: Plan, scenario: Scenario, emulator: Emulator, compute: ComputeMode) -> None:
    check_supported(plan, replace(scenario, code=CODE), compute, emulator)


def test_training_needs_the_code_of_the_model() -> None:
    check_supported(PLAN, SCENARIO, "paced", "none")
    with pytest.raises(InputError, match="model 'chain' has no code to train") as refused:
        check_supported(PLAN, SCENARIO, "real", "none")
    assert refused.value.where == "model.code"


def test_a_plan_file_without_optional_keys_can_be_run(tmp_path: Path) -> None:
    # Without partners, orders and synchronisation, which have defaults.
    stages = [
        {
            "first_layer": n,
            "end_layer": n + 1,
            "replicas": [{"device": f"device-{n}", "share": 1.0}],
            "in_flight": 2 - n,
        }
        for n in range(2)
    ]
    plan = {
        "version": 2,
        "scenario": "chain",
        "model": "chain",
        "strategy": "hand",
        "schedule": "1f1b",
        "pipelines": [{"stages": stages, "microbatches": [1, 1]}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    write_resolved_scenario(SCENARIO, tmp_path / "scenario.json")
    done = ropebridge("run", "scenario.json", "--plan", "plan.json", "--compute", "paced", "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
