"""Who does not know the job's key learns nothing, changes nothing and stops nobody; no path comes over the network."""

import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.backend import prepared_job
from executor.control.control_server import MAX_UNPROVED
from executor.control.node_agent import run_member
from executor.core.control_channel import (
    AGENT,
    HEAD,
    HEAD_ADDRESS,
    RANK,
    UNPROVED_LINE_BYTES,
    UnprovedHeadError,
    encode,
    listen,
    new_key,
    new_nonce,
    prove,
    reach_head,
)
from executor.core.job import JobFolder, RunConfig
from executor.core.messages import pack, unpack
from executor.deploy.bundle import HostedRun
from executor.deploy.deployment import Bundle
from executor.rank.control_client import FINISHED, ControlClient
from planner.events.event import Event, EventKind
from planner.scenario.scenario import ModelCode
from tests.helpers.networks.several_hosts import hosts_on_loopback
from tests.helpers.processes.control import Served, serving
from tests.helpers.processes.training import GPT, chain
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import RunError

SCENARIO = chain_scenario([1e-3] * 2, [1e-3] * 2)
PLAN = chain_plan(SCENARIO)
CONFIG = RunConfig("paced", 3, "none", adapts=True)
SOON_S = 20.0


@pytest.fixture
def head() -> Iterator[Served]:
    """The head of a job with two hosts, of which this one has rank 0."""
    hosts = hosts_on_loopback([("here", (0,)), ("there", (1,))])
    with prepared_job(SCENARIO, PLAN, CONFIG, hosts) as job, serving(job, 2, hosts) as served:
        yield served


def connected(head: Served) -> socket.socket:
    connection = socket.create_connection(head.address, timeout=SOON_S)
    head.connections.append(connection)
    return connection


def lines(connection: socket.socket) -> Any:
    return connection.makefile("rb")


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes a connection without another word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def proved(head: Served, role: str = RANK, rest: bytes = b"") -> socket.socket:
    """A connection on which the handshake is done, and what was sent with the proof."""
    connection, nonce = connected(head), new_nonce()
    connection.sendall(encode({"role": role, "nonce": nonce}))
    answer = json.loads(lines(connection).readline())
    connection.sendall(encode({"proof": prove(head.key, role, nonce, answer["nonce"])}) + rest)
    return connection


def assert_serves(head: Served) -> None:
    """Somebody who knows the key is still heard."""
    channel = reach_head(head.address, RANK, head.key, 0.0, SOON_S)
    channel.send("hello", rank=1, incarnation=0)
    channel.send("clock", asked=7)
    answer = channel.receive()
    assert answer is not None
    assert answer["asked"] == 7
    channel.close()
    peer, hello = head.server.events.get(timeout=SOON_S)
    assert (peer.rank, hello) == (1, {"kind": "hello", "rank": 1, "incarnation": 0})
    assert head.server.events.get(timeout=SOON_S) == (peer, None)


def test_idle_strangers_stop_nobody(head: Served) -> None:
    strangers = [connected(head) for _ in range(3 * MAX_UNPROVED)]
    assert_serves(head)
    # Only the newest may still be there.
    assert sum(not is_open(stranger) for stranger in strangers) >= 2 * MAX_UNPROVED


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_who_proves_nothing_is_sent_away_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", '{"proof_s": 0.3}')
    with prepared_job(SCENARIO, PLAN, CONFIG) as job, serving(job, 2) as head:
        silent, halfway = connected(head), connected(head)
        halfway.sendall(encode({"role": RANK, "nonce": new_nonce()}))
        assert lines(halfway).readline()
        assert is_closed(silent)
        assert is_closed(halfway)
        monkeypatch.delenv("ROPEBRIDGE_TIMEOUTS")
        assert_serves(head)


class Refusing(socket.socket):
    """As where a process has no descriptor left for a while."""

    refusals = 3

    def accept(self) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_a_head_without_descriptors_goes_on() -> None:
    listening = Refusing(fileno=listen(("127.0.0.1", 0)).detach())
    with prepared_job(SCENARIO, PLAN, CONFIG) as job, serving(job, 2, listening=listening) as head:
        assert_serves(head)
        assert listening.refusals == 0


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\xfe\n",
        b"[]\n",
        b"7\n",
        b"[" * 3000 + b"\n",
        b'{"role": "head", "nonce": "' + b"0" * 64 + b'"}\n',
        b'{"role": "rank", "nonce": "short"}\n',
        b'{"role": "rank", "nonce": 7}\n',
        b'{"role": ["rank"], "nonce": {}}\n',
        b'{"kind": "hello", "rank": 1, "incarnation": 0}\n',
        b"x" * (UNPROVED_LINE_BYTES + 1),
        b'{"role": "' + b"x" * UNPROVED_LINE_BYTES + b'"}\n',
    ],
)
def test_garbage_ends_its_own_connection_alone(words: bytes, head: Served) -> None:
    stranger = connected(head)
    stranger.sendall(words)
    assert is_closed(stranger)
    assert_serves(head)


def test_a_wrong_key_is_found_by_both_ends(head: Served) -> None:
    with pytest.raises(UnprovedHeadError, match="does not know this job's key"):
        reach_head(head.address, RANK, new_key(), 0.0, 0.0)
    impostor = proved(replace(head, key=new_key()), rest=encode({"kind": "hello", "rank": 1, "incarnation": 0}))
    assert is_closed(impostor)
    assert_serves(head)


def test_a_recorded_handshake_proves_nothing(head: Served) -> None:
    nonce, hello = new_nonce(), encode({"kind": "hello", "rank": 1, "incarnation": 0})
    first = encode({"role": RANK, "nonce": nonce})
    honest = connected(head)
    honest.sendall(first)
    answer = json.loads(lines(honest).readline())
    second = encode({"proof": prove(head.key, RANK, nonce, answer["nonce"])}) + hello
    honest.sendall(second)
    peer, _ = head.server.events.get(timeout=SOON_S)
    honest.close()
    assert head.server.events.get(timeout=SOON_S) == (peer, None)
    replayed = connected(head)
    replayed.sendall(first + second)
    said = lines(replayed).read()
    assert answer["nonce"].encode() not in said
    # Nor does the head's own proof, or that of another role.
    for role in (HEAD, AGENT):
        reflecting = connected(head)
        reflecting.sendall(first)
        own = json.loads(lines(reflecting).readline())
        proof = own["proof"] if role == HEAD else prove(head.key, AGENT, nonce, own["nonce"])
        reflecting.sendall(encode({"proof": proof}) + hello)
        assert is_closed(reflecting)
    assert_serves(head)


def test_a_host_tells_a_false_head_nothing_and_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims to know the key, repeats what the true one once said, and sends documents and orders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    heard: list[bytes] = []
    evil = encode({"kind": "welcome", "replaces": False, "documents": {"../../evil": {}}})
    with listen(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        hosts = replace(hosts_on_loopback([("here", (0,)), ("there", (1,))], arrival_s=0.5), port=port)
        recorded = {"nonce": new_nonce(), "proof": prove(hosts.key, HEAD, new_nonce(), new_nonce())}

        def deceive() -> None:
            for answer in (recorded, {**recorded, "proof": ""}, {"nonce": 7, "proof": None}):
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    heard.append(lines(connection).readline())
                    connection.sendall(encode(answer) + evil)
                    heard.append(lines(connection).read())

        threading.Thread(target=deceive, daemon=True).start()
        with pytest.raises(RunError, match=f"127.0.0.1:{port}.* (does not know this job's key|cannot be reached)"):
            run_member(hosts, "there", None)
    assert heard
    for said in filter(None, heard):
        assert set(json.loads(said)) == {"role", "nonce"}
    assert list(tmp_path.rglob("*evil*")) == []


@pytest.mark.parametrize(
    ("role", "hello"),
    [
        *((RANK, {"rank": rank, "incarnation": 0}) for rank in (-1, 2, True, "1", "../1", None, 0.5, [1])),
        (RANK, {"rank": 1, "incarnation": "0"}),
        *((AGENT, {"host": host}) for host in ("here", "nowhere", "../there", "/there", "", None, ["there"])),
    ],
)
def test_names_are_those_of_the_jobs_own_documents(role: str, hello: dict[str, Any], head: Served) -> None:
    other = proved(head, role, encode({"kind": "hello", **hello}))
    assert is_closed(other)
    assert_serves(head)


@pytest.mark.parametrize("kind", ["../parameters", "/tmp/parameters", "config", "key", "", None, 7, ["parameters"]])
def test_no_file_is_named_by_the_network(kind: object, head: Served) -> None:
    folder = head.server._job.path
    before = sorted(folder.iterdir())
    hello = encode({"kind": "hello", "rank": 1, "incarnation": 0})
    rank = proved(head, RANK, hello + encode({"kind": "file", "file": kind, "payload_bytes": 4}) + b"evil")
    assert is_closed(rank)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("size", [-1, 0, 1 << 40, "4", True, None])
def test_files_have_sizes(size: object, head: Served) -> None:
    hello = encode({"kind": "hello", "rank": 1, "incarnation": 0})
    rank = proved(head, RANK, hello + encode({"kind": "file", "file": "key", "payload_bytes": size}))
    assert is_closed(rank)


def test_a_file_goes_where_its_kind_and_rank_say(head: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAD_ADDRESS, json.dumps([*head.address, 0.0]))
    far, near = JobFolder(tmp_path), head.server._job
    content = os.urandom(3_000_000)
    far.of_rank("parameters", 1).write_bytes(content)
    (tmp_path / "key").write_bytes(near.key.read_bytes())
    client = ControlClient(far, 1, "rank 1")
    # Otherwise the end of the connection would end this process.
    client._outcome = FINISHED
    client.send_files(far)
    peer, _ = head.server.events.get(timeout=SOON_S)
    assert head.server.events.get(timeout=SOON_S) == (peer, {"kind": "files-sent"})
    assert near.of_rank("parameters", 1).read_bytes() == content
    assert not near.of_rank("resources", 1).exists()
    # A rank whose connection is closed before the end of the job ends its process.
    client._take({"kind": FINISHED})
    client._channel.close()


def test_a_host_imports_and_writes_what_its_own_part_names(tmp_path: Path) -> None:
    scenario, plan = chain()
    folder = tmp_path / "folder"
    folder.mkdir()
    given = RunConfig("real", 3, "none", adapts=False, checkpoints="/evil", checkpoint_every=1, spread=True)
    with prepared_job(scenario, plan, given) as job:
        documents = {**job.documents(), "../../evil": {}, "/tmp/evil": {}, "key": {}}
    documents["scenario"]["code"]["path"] = "/evil.py"
    here = JobFolder(folder)
    with pytest.raises(RunError, match="names no folder for them"):
        here.write_documents(documents, None, "")
    here.write_documents(documents, GPT.path, str(tmp_path / "checkpoints"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "plan.json", "scenario.json"]
    found, _, config = here.read()
    assert found.code is not None
    assert found.code.path == GPT.path
    assert config.checkpoints == str(tmp_path / "checkpoints")
    here.write_documents(documents, None, str(tmp_path / "checkpoints"))
    found, _, _ = here.read()
    assert isinstance(found.code, ModelCode)
    assert not found.code.path.exists()


def test_rows_are_of_devices_that_the_job_has() -> None:
    event = Event(EventKind.SEND, "device-0", "device-1", 0, 0, 0, 0, "F", 0.0, 1.0, 8)
    assert unpack(pack([event], None, None)["rows"], PLAN.devices) == [event]
    for changed in (replace(event, device="../evil"), replace(event, peer="/evil"), replace(event, device="")):
        with pytest.raises(ValueError, match="which the job does not have"):
            unpack(pack([changed], None, None)["rows"], PLAN.devices)


def test_keys_are_for_their_owner_alone_and_differ(tmp_path: Path) -> None:
    scenario, plan = chain()
    hosts = hosts_on_loopback([("here", (0, 1)), ("there", (2, 3))])
    Bundle(scenario, plan, HostedRun("real", 3, "none", 0, "", 0), hosts).write(tmp_path / "job")
    keys = [tmp_path / "job" / "key"]
    with prepared_job(SCENARIO, PLAN, CONFIG) as first, prepared_job(SCENARIO, PLAN, CONFIG, hosts) as second:
        keys += [first.key, second.key]
        assert [stat.S_IMODE(key.stat().st_mode) for key in keys] == [0o600] * 3
        assert keys[0].read_text() == keys[2].read_text() != keys[1].read_text()
        said = hosts.key.hex()
        for path in [*(tmp_path / "job").iterdir(), *second.path.iterdir()]:
            assert path.name == "key" or said not in path.read_bytes().decode(errors="replace")
    assert said not in repr(hosts)


def test_what_is_queued_for_a_slow_end_does_not_stop_the_others(head: Served) -> None:
    slow = proved(head, RANK, encode({"kind": "hello", "rank": 0, "incarnation": 0}))
    peer, _ = head.server.events.get(timeout=SOON_S)
    head.server.send(peer, "plan", text="x" * (1 << 24))
    assert_serves(head)
    started_s = time.monotonic()
    assert len(lines(slow).readline()) > 1 << 24
    assert time.monotonic() - started_s < SOON_S
