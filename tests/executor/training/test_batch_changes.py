"""A policy that changes the global batch while a model is trained: what one process finds with the same batches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.recovery.claim import resumption
from experiments.runs.folder import read_record, write_record
from planner.adapt.gradient_noise import GradientNorms
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.faults import Absence
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import BatchLimits, LearningRateSchedule, Optimizer
from tests.helpers.processes.training import (
    CONVOLUTIONAL,
    GPT,
    MODELS,
    Trained,
    assert_trained,
    hybrid_plan,
    train_in_one_process,
    training_scenario,
)
from tests.helpers.strategies.scripted_policy import Scripted

DIGITS = ModelCode(MODELS / "digits.py", {"width": 16, "depth": 2})
STEPS, FIRST_BATCH = 9, 12

# What the policy decides, by the observed step, and the batch of each step: decisions take effect two steps later.
DECIDED: dict[int, tuple[Sequence[int], float]] = {0: ([20, 13], 40.0), 3: ([50], 400.0), 4: ([5, 3], 7.5)}
BATCHES = (12, 12, 33, 33, 33, 50, 8, 8, 8)
NOISE = {33: 40.0, 50: 400.0, 8: 7.5}


def rate(rule: str, batch: int) -> float:
    """The factor on the learning rate, by the formulas of the paper on AdaScale: B_0 = 12, var = N / B_0, sqr = 1."""
    if batch == FIRST_BATCH:
        return 1.0
    scale, variance = batch / FIRST_BATCH, NOISE[batch] / FIRST_BATCH
    return {"linear": scale, "sqrt": scale**0.5, "adascale": (variance + 1) / (variance / scale + 1)}[rule]


def scenario_of(rule: str, code: ModelCode, optimizer: Optimizer, clip_norm: float | None = None) -> Scenario:
    plain = training_scenario(code, 3, optimizer=optimizer)
    training = replace(plain.training, batch=BatchLimits(8, 50, rule), clip_norm=clip_norm)
    return replace(plain, training=training)


def plan_of(scenario: Scenario, microbatches: Sequence[int], shares: Sequence[float], noise: float | None) -> Plan:
    stage = [(len(scenario.model.layers), shares)]
    plan = hybrid_plan(scenario, "1f1b", [(stage, microbatches)])
    # A bucket for each layer, whose sums overlap with the backward.
    return replace(plan, noise_scale=noise, synchronisation=Synchronisation(bucket_bytes=1))


def policy_of(scenario: Scenario) -> tuple[Plan, Scripted]:
    """The first plan, and the policy, which changes shares together with the batch."""
    shares = {0: [1.0, 2.0, 3.0], 3: [3.0, 1.0, 1.0], 4: [1.0, 1.0, 1.0]}
    plans = {step: plan_of(scenario, cut, shares[step], noise) for step, (cut, noise) in DECIDED.items()}
    return plan_of(scenario, [7, 5], [2.0, 1.0, 1.0], None), Scripted(plans)


def expected(scenario: Scenario, rule: str) -> Trained:
    return train_in_one_process(scenario, STEPS, BATCHES, [rate(rule, each) for each in BATCHES])


WARM_UP = LearningRateSchedule("cosine", 2, 12, 0.1)
CASES = {
    # A data set that is read in epochs.
    "adascale": (DIGITS, Optimizer("momentum", 0.05, schedule=WARM_UP), None),
    "linear": (GPT, Optimizer("sgd", 0.05), 0.5),
    # Not with attention: the keys' bias has a gradient of rounding errors alone, which AdamW makes large.
    "sqrt": (CONVOLUTIONAL, Optimizer("adamw", 0.001), None),
}


@pytest.mark.parametrize(
    "rule", ["adascale", *(pytest.param(each, marks=pytest.mark.slow) for each in ("linear", "sqrt"))]
)
def test_training_with_other_batches_is_that_of_one_process(rule: str, tmp_path: Path) -> None:
    code, optimizer, clip_norm = CASES[rule]
    scenario = scenario_of(rule, code, optimizer, clip_norm)
    plan, policy = policy_of(scenario)
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, policy, STEPS)
    assert_trained(record, target, expected(scenario, rule))
    metrics = record.metrics
    assert tuple(metrics["samples"]) == BATCHES
    trained = [sum(BATCHES[:step]) for step in range(STEPS)]
    assert [seen.samples_before for seen in policy.seen] == trained
    schedule = [optimizer.schedule.factor(each / FIRST_BATCH) for each in trained]
    rates = [optimizer.learning_rate * part * rate(rule, each) for part, each in zip(schedule, BATCHES, strict=True)]
    assert list(metrics["learning_rate"]) == pytest.approx(rates)
    assert_seen(policy, record.gradient_norms)
    write_record(record, tmp_path / "run")
    assert list(read_record(tmp_path / "run").metrics["learning_rate"]) == pytest.approx(rates)


def assert_seen(policy: Scripted, norms: Sequence[GradientNorms]) -> None:
    """The policy has seen the noise of every step, estimated from the norms of devices with unequal batches."""
    assert [sum(each.batch_sizes) for each in norms] == list(BATCHES)
    assert len(policy.seen) == len(norms) == STEPS
    for seen, own in zip(policy.seen, norms, strict=True):
        assert seen.noise == own.estimate("minimum-variance")


@pytest.mark.slow
def test_a_resumed_run_keeps_the_batch_and_its_place_in_the_data(tmp_path: Path) -> None:
    code, optimizer, _ = CASES["adascale"]
    scenario = scenario_of("adascale", code, optimizer)
    plan, policy = policy_of(scenario)
    folder, target = tmp_path / "checkpoints", tmp_path / "parameters.safetensors"
    TorchBackend("real", checkpoints=CheckpointConfig(folder, 3)).run(scenario, plan, policy, 8)
    step, known = resumption(folder, scenario, STEPS, print)
    assert (step, known.global_batch, known.noise_scale) == (8, 8, 7.5)
    backend = TorchBackend("real", parameters=target, checkpoints=CheckpointConfig(folder, 3, step))
    record = backend.run(scenario, known, None, STEPS)
    whole = expected(scenario, "adascale")
    assert_trained(record, target, replace(whole, losses=whole.losses[8:]))
    assert record.samples_before == sum(BATCHES[:8])
    # The place is that of the checkpoint also for a policy.
    policy = Scripted({})
    again = TorchBackend("real", checkpoints=CheckpointConfig(folder, 3, step)).run(scenario, known, policy, STEPS)
    assert again.losses == pytest.approx(record.losses, rel=1e-6)
    assert [seen.samples_before for seen in policy.seen] == [record.samples_before]


@pytest.mark.slow
def test_repeated_steps_have_their_batches_and_samples_again(tmp_path: Path) -> None:
    """A lost rank makes all others repeat the steps since the last copy, before and after the change of the batch."""
    code, optimizer, _ = CASES["adascale"]
    scenario = scenario_of("adascale", code, optimizer)
    plan, policy = policy_of(scenario)
    target = tmp_path / "parameters.safetensors"
    faulty = replace(scenario, faults=(Absence("device-2", 0.15, 0.3),))
    steps = 60
    record = TorchBackend("real", parameters=target, backup_every=4).run(faulty, plan, policy, steps)
    batches = (*BATCHES, *(8,) * (steps - STEPS))
    whole = train_in_one_process(scenario, steps, batches, [rate("adascale", each) for each in batches])
    assert_trained(record, target, whole)
    assert [norms.step for norms in record.gradient_norms] == list(range(steps))
