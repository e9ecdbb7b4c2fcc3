"""Orders carried out by torch's own pipeline runtime, in real processes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from experiments.benches.planning.pipeline_families import Times, problem_of
from planner.plan.actions import to_torch_csv
from planner.schedules import SCHEDULES

RANKS, MICROBATCHES = 2, 4
SCRIPT = Path(__file__).with_name("torch_rank.py")

pytestmark = pytest.mark.filterwarnings("default")  # what torch warns of is not ours


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [pytest.param("zb-h1", marks=pytest.mark.slow), "compact-zb"])
def test_torch_trains_by_our_orders_as_one_process_does(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    orders = SCHEDULES[name](problem_of([Times(latency_s=1)] * RANKS, [1] * MICROBATCHES, 3))
    csv = to_torch_csv([orders.actions(rank) for rank in range(RANKS)])
    assert "I" in csv
    (tmp_path / "orders.csv").write_text(csv)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [sys.executable, str(SCRIPT), str(tmp_path), str(RANKS), str(MICROBATCHES)]
    ranks = subprocess.run(arguments, env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ranks.returncode == 0, ranks.stderr

    script = load_script()
    model = torch.nn.Sequential(*script.layers(RANKS))
    inputs, targets = script.batch()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    for rank in range(RANKS):
        gradients, losses = torch.load(tmp_path / f"rank-{rank}.pt")
        for found, parameter in zip(gradients, model[rank].parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
