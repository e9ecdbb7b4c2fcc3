"""`make gpu` where there is no GPU: it says so; and everything in it that does not need one works on the CPU."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor.profiling.layer_times import measure_layers
from executor.training.device import CPU, compute_device
from executor.training.models.loading import load_with_sizes
from experiments.benches.execution import gpu_check
from experiments.benches.execution.equal_training import GROUP, WAYS, Trained, largest_difference, train_in_one_process
from experiments.benches.execution.gpu_check import FULL, GpuCheck, main, run_gpu_check
from experiments.benches.execution.gpu_transport import nccl_kind
from experiments.benches.simulation.predicted import TrainedCase
from planner.check import check_plan
from planner.cost.device_transport import NCCL, boundary_transport
from planner.scenario.scenario import ModelCode
from planner.scenario.training import Optimizer


def tiny(case: TrainedCase, **arguments: int) -> TrainedCase:
    code = ModelCode(case.code.path, {**case.code.arguments, **arguments})
    return replace(case, code=code, samples=2, microbatches=3, steps=2, kind="cpu")


GPT = tiny(FULL.equal[0], width=16, blocks=2, length=8)
CONVOLUTIONAL = tiny(FULL.equal[1], width=8, side=16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "-o", str(target)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(gpu_check.__file__, run_name="__main__")
    assert end.value.code == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "this machine has no GPU" in line
    assert not said.out
    assert not target.exists()


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the place comes first"))
    assert main(["-o", str(tmp_path / "absent" / "page.md")]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "does not exist; create it first" in said.err


@pytest.mark.slow
def test_all_of_it_on_the_cpu() -> None:
    check = GpuCheck([GPT], [*WAYS, GROUP], [CONVOLUTIONAL], ["zb-h1"], repeats=2)
    page, equal = run_gpu_check(check, CPU, lambda _: None)
    assert equal, page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    layers, heads_and_rules = len(load_with_sizes(CONVOLUTIONAL.code, 0).sizes), 2 * 3
    assert len(rows) == len(WAYS) + 1 + layers + 1 + heads_and_rules
    assert "gpt, zb-h1, backward split, recomputed" in page
    assert "real-convolutional-zb-h1" in page
    assert "not verified: NCCL needs two GPUs of a kind of the datasheet, and this machine has no GPU" in page
    assert page.splitlines()[2].startswith("CPU; ")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([], None),
        (["NVIDIA H100 80GB HBM3"], None),
        (["NVIDIA H100 80GB HBM3"] * 2, "h100-80"),
        (["NVIDIA L4", "Tesla T4", "Tesla T4"], "t4"),
        # Two GPUs of which the datasheet knows nothing.
        (["NVIDIA GeForce RTX 3060"] * 2, None),
    ],
)
def test_nccl_is_verified_on_two_gpus_of_a_kind(names: list[str], kind: str | None) -> None:
    assert nccl_kind(names) == kind
    if kind is not None:
        case = replace(GPT, kind=kind, host="box")
        scenario = case.scenario
        plan = case.plan(scenario, "1f1b")
        assert boundary_transport(plan, scenario, *plan.devices) == NCCL
        check_plan(plan, scenario)


@pytest.mark.parametrize("case", [GPT, CONVOLUTIONAL], ids=["gpt", "convolutional"])
@pytest.mark.parametrize("stage", ["whole", "first", "last", "inner"])
def test_the_layers_of_any_stage_can_be_timed(case: TrainedCase, stage: str) -> None:
    loaded = load_with_sizes(case.code, seed=0)
    count = len(loaded.sizes)
    layers = {"whole": range(count), "first": range(2), "last": range(count - 1, count), "inner": range(1, 2)}[stage]
    times = measure_layers(loaded, layers, 2, case.scenario.training, repeats=1, device=CPU)
    assert [each.layer for each in times] == list(layers)
    assert all(each.forward_s > 0 and each.backward_s > 0 and each.backward_input_s > 0 for each in times)


@pytest.mark.parametrize(
    ("kind", "compute"), [("cpu", "real"), ("cpu-epyc", "real"), ("t4", "paced")], ids=["cpu", "a-cpu", "paced"]
)
def test_what_stays_on_the_cpu_with_gpus_at_hand(kind: str, compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert compute_device([kind], 0, compute) == CPU


@pytest.mark.parametrize(("rank", "gpus", "chosen"), [(0, 1, 0), (3, 1, 0), (1, 2, 1), (5, 4, 1)])
def test_ranks_of_a_machine_take_its_gpus_in_turn(
    rank: int, gpus: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert compute_device(["t4"] * 6, rank, "real") == torch.device("cuda", chosen)
    assert current == [torch.device("cuda", chosen)]


def test_other_training_shows_in_the_difference() -> None:
    scenario = replace(GPT.scenario, training=replace(GPT.scenario.training, optimizer=Optimizer("momentum", 0.05)))
    expected = train_in_one_process(scenario, 2, CPU)
    assert largest_difference(train_in_one_process(scenario, 2, CPU), expected) == 0
    name, value = next(iter(expected.parameters.items()))
    changed = {**expected.parameters, name: value + 0.01 * (1 + value.abs())}
    assert largest_difference(Trained(expected.losses, changed), expected) == pytest.approx(0.01, rel=1e-3)
    lost = {**expected.parameters, name: torch.full_like(value, torch.nan)}
    assert largest_difference(Trained(expected.losses, lost), expected) == float("inf")
    assert largest_difference(Trained(expected.losses, {}), expected) == float("inf")
