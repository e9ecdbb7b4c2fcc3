"""A job under way does not notice who reaches its ports, reads its network addresses and floods it, but has no key."""

import json
import stat
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.core.subprocesses import ForkedProcess
from experiments.benches.processes import marked_processes, places_listened_at
from experiments.runs.scenario import choose_scenario
from planner.systems.registry import make_plan
from tests.helpers.processes.process_watch import PATIENCE_S, left_behind, processes_of, started, wait_until
from tests.helpers.processes.strangers import WAYS, attack

# Over emulated links a step takes longer than the messages on the way, some 60 ms.
STEPS = 200


@pytest.mark.slow
def test_a_job_trains_on_among_strangers(tmp_path: Path) -> None:
    scratch, run = tmp_path / "scratch", tmp_path / "run"
    options = ["--strategy=megatron", "--emulator=shaper", "--backup-every", "5", "--steps", str(STEPS), "-o", str(run)]
    with started(["run", "digits", *options], tmp_path) as (process, mark):
        wait_until(lambda: any(path.stat().st_size for path in scratch.rglob("resources-*.jsonl")), "no step is done")
        places = places_listened_at(mark)
        assert {address for address, _ in places} == {"127.0.0.1"}
        (job,) = scratch.glob("ropebridge-*")
        # The folders of pytest are for this user alone too.
        assert stat.S_IMODE(job.stat().st_mode) == 0o700
        files = [str(path) for path in scratch.rglob("*") if path.is_file()]
        ranks = processes_of("executor.rank.worker", mark)
        stranger = ForkedProcess(
            "stranger",
            partial(attack, places, files, [*marked_processes(mark)]),
            {},
            tmp_path / "heard",
        )
        assert stranger.wait() == 0, (tmp_path / "heard").read_text()
        assert process.poll() is None, "the job was too short for this test"
        assert processes_of("executor.rank.worker", mark) == ranks
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    assert left_behind(tmp_path) == []
    found = json.loads((tmp_path / "heard").read_text())
    # The ports of gloo do not answer any more; the head's does, with nothing but handshakes and alerts of TLS.
    assert len(places) > 1
    assert len(found["open"]) == 1
    assert found["heard"].keys() == WAYS.keys()
    hello, alert = 0x16, 0x15
    for way, answers in found["heard"].items():
        for answer in map(bytes.fromhex, answers):
            assert answer == b"" or answer[0] in (hello, alert), way
            assert b"kind" not in answer, way
    assert found["signalled"] == found["read"] == []
    scenario = choose_scenario("digits")
    path = tmp_path / "undisturbed.safetensors"
    TorchBackend("real", parameters=path, backup_every=5).run(scenario, make_plan("megatron", scenario), None, STEPS)
    expected, trained = load_file(path), load_file(run / "parameters.safetensors")
    assert expected.keys() == trained.keys()
    assert all(torch.equal(expected[name], trained[name]) for name in expected)
