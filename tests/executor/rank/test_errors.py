"""What is wrong between ranks ends the run on all of them at once, with one message that names rank, host and cause."""

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from executor.backend import TorchBackend
from executor.control.launcher import prepared_job, run_job
from executor.core.control_channel import HEAD_ADDRESS, new_key, reach_head
from executor.core.failures import SharedInputError
from executor.core.job import JobFolder, RunConfig
from executor.rank.control_client import ControlClient
from executor.rank.facts import model_facts
from executor.rank.handshake import Agreements, Disagreement, Facts
from executor.training.models.loading import LayerSize, SampleShape
from executor.transport.rendezvous import check_interface, connect
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.networks.several_hosts import free_port, hosts_on_loopback
from tests.helpers.processes.process_watch import PATIENCE_S, left_behind, started
from tests.helpers.processes.unlike_ranks import UNLIKE
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError, RopebridgeError, RunError

HOST = socket.gethostname()
CONFIG = RunConfig("paced", 3, "none", False)

SCENARIO = chain_scenario([1e-3] * 3, [1e-3] * 3, global_batch=6)
PLAN = chain_plan(SCENARIO)


def documents(path: Path, scenario: Scenario = SCENARIO, plan: Plan = PLAN) -> Path:
    """What a rank reads, in a folder of its own."""
    path.mkdir()
    JobFolder(path).write(scenario, plan, CONFIG)
    return path


def run_unlike(
    folders: Sequence[Path], changes: Sequence[Mapping[str, str]], scenario: Scenario = SCENARIO, plan: Plan = PLAN
) -> None:
    """Run ranks of one job that have been given unlike documents and environments."""
    with prepared_job(scenario, plan, CONFIG) as job:
        described = [[str(folder), change] for folder, change in zip(folders, changes, strict=True)]
        (job.path / UNLIKE).write_text(json.dumps(described))
        run_job(job, plan.devices, module="tests.helpers.processes.unlike_ranks")


def test_ranks_that_nobody_steers_run_to_their_end(tmp_path: Path) -> None:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2, global_batch=6)
    plan = chain_plan(scenario)
    folder = documents(tmp_path / "job", scenario, plan)
    run_unlike([folder] * 2, [{}] * 2, scenario, plan)


def test_another_plan_another_scenario_and_another_version_are_named(tmp_path: Path) -> None:
    same = documents(tmp_path / "same")
    deeper = documents(tmp_path / "plan", plan=PLAN.with_microbatches(0, (6,), (1, 1, 1)))
    training = replace(SCENARIO.training, seed=7)
    other = documents(tmp_path / "scenario", replace(SCENARIO, training=training))
    information = tmp_path / "versions" / "ropebridge-9.9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ropebridge\nVersion: 9.9.9\n")
    with pytest.raises(RunError) as raised:
        run_unlike([same, deeper, other], [{}, {}, {"PYTHONPATH": str(information.parent)}])
    first, second = str(raised.value).split("; ")
    assert first.startswith(f"rank 1 (device 'device-1', host {HOST}) has another plan than rank 0: plan ")
    assert second.startswith(
        f"rank 2 (device 'device-2', host {HOST}) has another ropebridge and scenario than rank 0: ropebridge 9.9.9 "
    )


def test_a_missing_interface_of_one_rank_is_named(tmp_path: Path) -> None:
    folder = documents(tmp_path / "job")
    with pytest.raises(RunError) as raised:
        run_unlike([folder] * 3, [{}, {"GLOO_SOCKET_IFNAME": "wan9"}, {}])
    assert str(raised.value).startswith(
        f"rank 1 (device 'device-1', host {HOST}): GLOO_SOCKET_IFNAME: there is no network interface 'wan9'; there are "
    )


def test_a_rank_that_cannot_find_the_head_says_where(tmp_path: Path) -> None:
    folder = documents(tmp_path / "job")
    nowhere = {HEAD_ADDRESS: json.dumps(["nowhere.invalid", 1, 0.0]), "ROPEBRIDGE_TIMEOUTS": '{"reach_s": 0.5}'}
    where = rf"rank 1 \(device 'device-1', host {HOST}\): the job's head at nowhere.invalid:1 cannot be reached: "
    with pytest.raises(RunError, match=where):
        run_unlike([folder] * 3, [{}, nowhere, {}])


def test_a_head_that_cannot_listen_says_where() -> None:
    hosts = hosts_on_loopback([("here", (0, 1, 2))])
    taken = socket.create_server(("127.0.0.1", hosts.port))
    where = f"the head cannot listen at 127.0.0.1, port {hosts.port}: Address already in use"
    with taken, pytest.raises(RunError, match=where):
        TorchBackend("paced", hosts=hosts).run(SCENARIO, PLAN, None, 3)


def test_an_address_that_does_not_answer_is_given_up_in_time() -> None:
    port = free_port()
    with pytest.raises(RunError, match=f"the job's head at 127.0.0.1:{port} cannot be reached: Connection refused"):
        reach_head(("127.0.0.1", port), new_key(), 0.0, 0.3)


def test_a_rank_without_a_way_to_the_others_names_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", '{"connect_s": 0.3}')
    check_interface()
    with pytest.raises(RunError, match=r"connect to the other ranks through the network interface 'lo' \(GLOO_"):
        connect(HashStore(), 0, 2, "alone")


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
            "rank 1 (device 'right', host HOST): MODEL: layer 0 has 12 bytes of output for one sample; its profile "
            "'first' says 16: correct the profile or 'arguments'",
            id="other-sizes-on-one-rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "x = x.repeat(1, 2) if Shaped.calls > 3 and RANK == '0' else x",
            "rank 0 (device 'left', host HOST): stage 0 sends 32 bytes for samples 0 to 0 of microbatch 3, but the "
            "plan expects 16; a layer's output must have the same shape for every sample in every step",
            id="other-sizes-as-it-runs",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "x = (x,) if Shaped.calls > 3 and RANK == '0' else x",
            "rank 0 (device 'left', host HOST): a layer of class Shaped returns a value of type tuple; a layer returns "
            "one tensor in every step",
            id="no-tensor-as-it-runs",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_that_disagrees_with_the_plan_is_wrong_input(layer: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(layer=layer))
    (tmp_path / "shapes.yaml").write_text(MODEL_SCENARIO)
    target = tmp_path / "run"
    arguments = ["run", str(tmp_path / "shapes.yaml"), "--strategy", "megatron", "--on-this-device", "-o", str(target)]
    with started(arguments, tmp_path) as (process, _):
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (2, ""), errors
    expected = message.replace("HOST", HOST).replace("MODEL", str(tmp_path / "model.py"))
    assert errors == f"ropebridge: {expected}\n"
    assert left_behind(tmp_path) == []
    assert not target.exists()


def test_shapes_are_compared_besides_bytes() -> None:
    facts = [model_facts([LayerSize(4000, SampleShape(shape, torch.float32))]) for shape in [(250,), (25, 10)]]
    outcomes = meet([lambda own=own: (0, own) for own in facts], wrong_input=True)
    assert [(type(each), str(each)) for each in outcomes] == [
        (
            SharedInputError,
            "rank 1 has another layer 0 than rank 0: layer 0 [25, 10] float32 per sample, 4000 bytes of parameters "
            "instead of [250] float32 per sample, 4000 bytes of parameters",
        )
    ] * 2


Prepare = Callable[[], tuple[int, Facts]]


class Meeting:
    """The head's part in agreements of ranks that are threads of one process."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.agreements = Agreements(self.answer)
        self.lock = threading.RLock()

    def answer(self, rank: int, topic: str, outcome: Disagreement | None) -> None:
        error, wrong_input = (outcome.message, outcome.wrong_input) if outcome is not None else (None, False)
        self.members[rank].hear({"topic": topic, "error": error, "wrong_input": wrong_input, "token": "", "now_s": 0.0})


class Member(ControlClient):
    """A rank's connection to a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.name = rank, f"rank {rank}"
        self._meeting = meeting
        self._changed = threading.Condition()
        self._agreed, self._outcome = {}, ""
        meeting.members[rank] = self

    def send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        with self._meeting.lock:
            self._meeting.agreements.state(self.rank, {**fields})

    def hear(self, answer: dict[str, object]) -> None:
        with self._changed:
            self._agreed[str(answer["topic"])] = answer
            self._changed.notify_all()


def meet(
    preparations: Sequence[Prepare | None], patience_s: float = 5.0, *, wrong_input: bool = False
) -> list[int | Exception]:
    """What becomes of each rank, in threads of one process; None never comes."""
    meeting, outcomes = Meeting(), list[int | Exception](range(len(preparations)))

    def take_part(rank: int, prepare: Prepare) -> None:
        member = Member(meeting, rank)
        try:
            agreed = member.agree("topic", len(preparations), prepare, patience_s, wrong_input=wrong_input)
            outcomes[rank] = agreed.value
        except Exception as failure:
            outcomes[rank] = failure

    threads = [
        threading.Thread(target=take_part, args=(rank, prepare))
        for rank, prepare in enumerate(preparations)
        if prepare is not None
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with meeting.lock:
            meeting.agreements.give_up_late()
        threads[-1].join(0.01)
    for thread in threads:
        thread.join()
    return outcomes


def stating(value: int) -> Prepare:
    return lambda: (value, {"plan": str(value), "same": "on all"})


def failing(error: Exception) -> Prepare:
    def fail() -> tuple[int, Facts]:
        raise error

    return fail


@settings(max_examples=25)
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


def test_a_failure_of_several_ranks_is_told_once() -> None:
    outcomes = meet([failing(InputError("no")), stating(0), failing(InputError("no")), failing(InputError("never"))])
    assert [str(each) for each in outcomes] == ["rank 0, rank 2: no; rank 3: never"] * 4


def test_input_that_no_rank_can_use_is_told_without_their_names() -> None:
    outcomes = meet([failing(InputError("no", where="model.py", valid="yes"))] * 3)
    assert [(type(each).__mro__[1], str(each)) for each in outcomes] == [(InputError, "model.py: no; yes")] * 3


def test_an_error_that_nobody_foresaw_is_the_one_that_is_told(tmp_path: Path) -> None:
    broken, whole = documents(tmp_path / "broken"), documents(tmp_path / "whole")
    (broken / "config.json").unlink()
    cause = f"[Errno 2] No such file or directory: '{broken / 'config.json'}'"
    with pytest.raises(RunError) as raised:
        run_unlike([broken, whole, whole], [{}] * 3)
    # Without the documents nobody knows the device.
    assert str(raised.value) == f"rank 0 (host {HOST}): {cause}"


def test_a_rank_that_comes_in_the_last_moment_is_not_missed() -> None:
    answers: list[tuple[int, str, Disagreement | None]] = []
    agreements = Agreements(lambda *answer: answers.append(answer))
    said = {"topic": "topic", "count": 2, "wait_s": 0.0}
    for rank in range(2):
        agreements.state(rank, {**said, "statement": {"name": f"rank {rank}"}})
    agreements.give_up_late()
    assert answers == [(0, "topic", None), (1, "topic", None)]


def test_a_process_that_comes_later_is_compared_with_those_who_have_agreed() -> None:
    answers: list[tuple[int, str, Disagreement | None]] = []
    agreements = Agreements(lambda *answer: answers.append(answer))
    said = {"topic": "topic", "count": 2, "wait_s": 60.0}
    for rank in range(2):
        agreements.state(rank, {**said, "statement": {"name": f"rank {rank}", "facts": {"plan": "a"}}})
    answers.clear()
    for plan in "ab":
        agreements.state(1, {**said, "statement": {"name": "rank 1", "facts": {"plan": plan}}})
    assert answers[0] == (1, "topic", None)
    assert answers[1][2] == Disagreement("rank 1 has another plan than rank 0: plan b instead of a", wrong_input=False)


def test_an_error_that_nobody_foresaw_stays_itself_and_is_told_to_the_others() -> None:
    broken = ZeroDivisionError("by nought")
    outcomes = meet([stating(0), failing(broken)])
    assert outcomes[1] is broken
    assert isinstance(outcomes[0], RunError)
    assert str(outcomes[0]) == "rank 1: by nought"


def test_a_rank_that_does_not_come_is_named_by_all_that_do() -> None:
    outcomes = meet([stating(0), None, stating(0)], patience_s=0.2)
    assert [str(each) for each in (outcomes[0], outcomes[2])] == ["rank 1 did not join the other ranks within 0 s"] * 2
