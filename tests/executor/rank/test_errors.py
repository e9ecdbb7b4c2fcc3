"""What is wrong between ranks ends the run on all of them at once, with one message that names rank, host and cause."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from executor.core.clock import create_origin
from executor.core.failures import SharedInputError, SharedRunError
from executor.core.job import JobFolder, RunConfig
from executor.rank.handshake import Facts, Handshake, model_facts
from executor.training.models.loading import LayerSize, SampleShape
from executor.transport.link_shaper import create_ledger
from executor.transport.rendezvous import check_interface, reach_store, try_connections
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.processes.process_watch import PATIENCE_S, left_behind, started
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError, RopebridgeError, RunError

ROOT = Path(__file__).parents[3]
HOST = socket.gethostname()

# Loading torch takes most of it.
SOON_S = 60.0

SCENARIO = chain_scenario([1e-3] * 3, [1e-3] * 3, global_batch=6)
PLAN = chain_plan(SCENARIO)


def job(path: Path, scenario: Scenario = SCENARIO, plan: Plan = PLAN) -> Path:
    path.mkdir()
    folder = JobFolder(path)
    folder.write(scenario, plan, RunConfig("paced", 3, "none", False))
    create_ledger(folder.ledger, scenario.cluster)
    create_origin(folder.origin)
    return path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_ranks(
    jobs: Sequence[Path], changes: Sequence[Mapping[str, str]], ranks: Sequence[int] | None = None, port: int = 0
) -> list[tuple[int, str]]:
    """Start ranks by hand, as torchrun does on several hosts, without an agent that ends them all when one fails.

    Returns the exit status of each, and what ropebridge says on its stderr; all must have ended soon.
    """
    port = port or free_port()
    processes = []
    for rank in ranks if ranks is not None else range(len(jobs)):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            # The folder where the tests stand comes before it otherwise.
            "PYTHONSAFEPATH": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(jobs)),
            "RANK": str(rank),
            **changes[rank],
        }
        command = [sys.executable, "-m", "executor.rank.worker", str(os.getpid()), str(jobs[rank])]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    deadline_s = time.monotonic() + SOON_S
    try:
        said = [each.communicate(timeout=max(0.0, deadline_s - time.monotonic()))[1] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.communicate()
    lines = [[line for line in text.splitlines() if line.startswith("ropebridge: ")] for text in said]
    return [(each.returncode, "\n".join(own)) for each, own in zip(processes, lines, strict=True)]


def test_ranks_started_by_hand_run_to_their_end(tmp_path: Path) -> None:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2, global_batch=6)
    folder = job(tmp_path / "job", scenario, chain_plan(scenario))
    assert run_ranks([folder] * 2, [{}] * 2) == [(0, "")] * 2


def test_another_plan_another_scenario_and_another_version_are_named_on_every_rank(tmp_path: Path) -> None:
    same = job(tmp_path / "same")
    deeper = job(tmp_path / "plan", plan=PLAN.with_microbatches(0, (6,), (1, 1, 1)))
    training = replace(SCENARIO.training, seed=7)
    other = job(tmp_path / "scenario", replace(SCENARIO, training=training))
    information = tmp_path / "versions" / "ropebridge-9.9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ropebridge\nVersion: 9.9.9\n")
    newer = {"PYTHONPATH": f"{information.parent}{os.pathsep}{ROOT}"}
    (status, message), *rest = run_ranks([same, deeper, other], [{}, {}, newer])
    assert status == 1
    assert rest == [(status, message)] * 2
    first, second = message.removeprefix("ropebridge: ").split("; ")
    assert first.startswith(f"rank 1 (device 'device-1', host {HOST}) has another plan than rank 0: plan ")
    assert second.startswith(
        f"rank 2 (device 'device-2', host {HOST}) has another ropebridge and scenario than rank 0: ropebridge 9.9.9 "
    )


def test_a_missing_interface_of_one_rank_is_named_on_every_rank(tmp_path: Path) -> None:
    folder = job(tmp_path / "job")
    ended = run_ranks([folder] * 2, [{}, {"GLOO_SOCKET_IFNAME": "wan9"}])
    assert ended[1] == ended[0]
    status, message = ended[0]
    assert status == 1
    assert message.startswith(
        f"ropebridge: rank 1 (device 'device-1', host {HOST}): there is no network interface 'wan9' "
        "(GLOO_SOCKET_IFNAME); there are "
    )


def test_a_rank_that_cannot_hold_or_find_the_rendezvous_says_where(tmp_path: Path) -> None:
    folder = job(tmp_path / "job")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_ranks([folder] * 3, [{}, {"MASTER_ADDR": "nowhere.invalid"}, {}], ranks=[0, 1], port=port)
    (held, holder), (sought, seeker) = ended
    assert (held, sought) == (1, 1)
    where = f"ropebridge: rank 0 (device 'device-0', host {HOST}): cannot hold the rendezvous at 127.0.0.1:{port}"
    assert holder == f"{where}: the port is in use"
    assert seeker.startswith(
        f"ropebridge: rank 1 (device 'device-1', host {HOST}): cannot reach the rendezvous at nowhere.invalid:{port}: "
    )


def test_an_address_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RunError, match=rf"cannot reach the rendezvous at 127.0.0.1:{port}: Connection refused"):
        reach_store(1, connect_s=0.3)


def test_a_rank_without_a_way_to_the_others_names_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check_interface()
    with pytest.raises(RunError, match=r"connect to the other ranks through the network interface 'lo' \(GLOO_"):
        try_connections(HashStore(), 0, 2, connect_s=0.3)


# Everything that a rank computes with looks at the environment, which differs between the ranks of a run and from the
# command's own: no check before the start can see it.
MODEL = """
import os
import torch
RANK = os.environ.get("RANK", "none")
class Shaped(torch.nn.Module):
    calls = 0
    def forward(self, x):
        Shaped.calls += 1
        {layer}
        return x
class Padded(torch.nn.Linear):
    def forward(self, x):
        return super().forward(torch.nn.functional.pad(x, (0, 4 - x.shape[1])))
class Model:
    def __init__(self):
        self.layers = [Shaped(), torch.nn.Flatten(), Padded(4, 4)]
    def loss(self, outputs, targets):
        return torch.nn.functional.mse_loss(outputs, targets)
    def samples(self, first, count):
        return torch.ones(count, 4), torch.ones(count, 4)
def build():
    return Model()
"""

MODEL_SCENARIO = """
name: shapes
cluster:
  devices:
    - {name: left, kind: t4, region: here}
    - {name: right, kind: t4, region: here}
  links:
    - {inside: here, bandwidth: 1 Gbit/s, latency: 0 ms}
model:
  name: shapes
  code: model.py
  layers:
    - {name: first, parameters: 0 B, output: 16 B, activation: 16 B, forward: 32 FLOP}
    - {name: second, parameters: 0 B, output: 16 B, activation: 16 B, forward: 32 FLOP}
    - {name: third, parameters: 80 B, output: 16 B, activation: 16 B, forward: 32 FLOP}
training: {global_batch: 4, microbatch: 1}
"""


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        pytest.param(
            "x = x[:, :3] if RANK == '1' else x",
            "rank 1 (device 'right', host HOST): layer 0 has 12 bytes of output for one sample; its profile 'first' "
            "says 16: correct the profile or 'arguments'",
            id="other-sizes-on-one-rank",
        ),
        pytest.param(
            "x = x.repeat(1, 2) if Shaped.calls > 3 and RANK == '0' else x",
            "rank 0 (device 'left', host HOST): stage 0 sends 32 bytes for samples 0 to 0 of microbatch 3, and the "
            "plan says 16; a layer must put out the same shape for every sample in every step",
            id="other-sizes-as-it-runs",
        ),
    ],
)
def test_a_model_that_disagrees_with_the_plan_is_wrong_input(layer: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(layer=layer))
    (tmp_path / "shapes.yaml").write_text(MODEL_SCENARIO)
    target = tmp_path / "run"
    arguments = ["run", str(tmp_path / "shapes.yaml"), "--strategy", "megatron", "-o", str(target)]
    with started(arguments, tmp_path) as (process, _):
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (2, ""), errors
    assert errors == f"ropebridge: {message.replace('HOST', HOST)}\n"
    assert left_behind(tmp_path) == []
    assert not target.exists()


def test_shapes_are_compared_besides_bytes() -> None:
    profile = replace(SCENARIO.model, layers=SCENARIO.model.layers[:1])
    facts = [model_facts([LayerSize(4000, SampleShape(shape, torch.float32))], profile) for shape in [(250,), (25, 10)]]
    outcomes = meet([lambda own=own: (0, own) for own in facts], error=SharedInputError)
    assert [(type(each), str(each)) for each in outcomes] == [
        (
            SharedInputError,
            "rank 1 has another layer 0 than rank 0: layer 0 [25, 10] float32 per sample, 4000 bytes of parameters "
            "instead of [250] float32 per sample, 4000 bytes of parameters",
        )
    ] * 2


Prepare = Callable[[], tuple[int, Facts]]


def meet(
    preparations: Sequence[Prepare | None],
    patience_s: float = 5.0,
    error: Callable[[str], RopebridgeError] = SharedRunError,
) -> list[int | Exception]:
    """What becomes of each rank, in threads of one process; None never comes."""
    store, outcomes = HashStore(), list[int | Exception](range(len(preparations)))

    def take_part(rank: int, prepare: Prepare) -> None:
        handshake = Handshake(store, rank, len(preparations), f"rank {rank}", holds_store=False)
        try:
            outcomes[rank] = handshake.agree("topic", prepare, patience_s, error)
        except Exception as failure:
            outcomes[rank] = failure

    threads = [
        threading.Thread(target=take_part, args=(rank, prepare))
        for rank, prepare in enumerate(preparations)
        if prepare is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def stating(value: int) -> Prepare:
    return lambda: (value, {"plan": str(value), "same": "on all"})


def failing(error: Exception) -> Prepare:
    def fail() -> tuple[int, Facts]:
        raise error

    return fail


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_ranks_agree_exactly_if_all_say_the_same(values: list[int]) -> None:
    outcomes = meet([stating(value) for value in values])
    unlike = [rank for rank, value in enumerate(values) if value != values[0]]
    if not unlike:
        assert outcomes == values
        return
    expected = "; ".join(
        f"rank {rank} has another plan than rank 0: plan {values[rank]} instead of {values[0]}" for rank in unlike
    )
    assert [(type(each).__mro__[1], str(each)) for each in outcomes] == [(RunError, expected)] * len(values)


@pytest.mark.parametrize(
    ("error", "kind"), [(InputError("no", valid="yes"), InputError), (RunError("no; yes"), RunError)]
)
def test_a_failure_of_one_rank_is_that_of_all(error: RopebridgeError, kind: type[RopebridgeError]) -> None:
    outcomes = meet([stating(0), failing(error), stating(0)])
    assert [str(each) for each in outcomes] == ["rank 1: no; yes"] * 3
    assert all(isinstance(each, kind) for each in outcomes)


def test_an_error_that_nobody_foresaw_reaches_the_others_though_the_store_ends_with_it(tmp_path: Path) -> None:
    broken, whole = job(tmp_path / "broken"), job(tmp_path / "whole")
    (broken / "orders.json").unlink()
    cause = f"[Errno 2] No such file or directory: '{broken / 'orders.json'}'"
    name = f"ropebridge: rank 0 (device 'device-0', host {HOST}): {cause}"
    assert run_ranks([broken, whole, whole], [{}] * 3) == [(1, name)] * 3


class LateStore:
    """A store to which the last rank comes between two looks at it."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.set, self.get, self.add = self._store.set, self._store.get, self._store.add

    def check(self, keys: Sequence[str]) -> bool:
        found: bool = self._store.check(list(keys))
        if len(keys) > 1:
            self.set("topic/1", json.dumps({"name": "rank 1"}))
        return found


def test_a_rank_that_comes_in_the_last_moment_is_not_missed() -> None:
    store = LateStore()
    handshake = Handshake(cast(Store, store), 0, 2, "rank 0", holds_store=False)
    assert handshake.agree("topic", lambda: (7, {}), patience_s=0.0) == 7
    # A third rank might look at this before it looks again who is there.
    assert not store.check(["topic/absent"])


def test_an_error_that_nobody_foresaw_stays_itself_and_is_told_to_the_others() -> None:
    broken = ZeroDivisionError("by nought")
    outcomes = meet([stating(0), failing(broken)])
    assert outcomes[1] is broken
    assert isinstance(outcomes[0], RunError)
    assert str(outcomes[0]) == "rank 1: by nought"


def test_a_rank_that_does_not_come_is_named_by_all_that_do() -> None:
    outcomes = meet([stating(0), None, stating(0)], patience_s=0.2)
    assert [str(each) for each in (outcomes[0], outcomes[2])] == [
        "rank 1 did not come to the rendezvous within 0 s"
    ] * 2
