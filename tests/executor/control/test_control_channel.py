"""Who does not know the job's key learns nothing, changes nothing and stops nobody; no path comes over the network."""

import errno
import json
import os
import socket
import ssl
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.control.control_server import MAX_UNPROVED
from executor.control.launcher import prepared_job
from executor.control.node_agent import run_member
from executor.core.control_channel import (
    HEAD_ADDRESS,
    Channel,
    Message,
    UnprovedHeadError,
    encode,
    listen,
    new_key,
    reach_head,
)
from executor.core.job import JobFolder, RunConfig
from executor.core.messages import SessionSpec, pack, unpack
from executor.core.tls import UNPROVED_BYTES, TlsEnd, identity
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
HELLO: Message = {"kind": "hello", "rank": 1, "incarnation": 0}


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


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes a connection without another word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def proved(head: Served, *words: Message, payload: bytes = b"") -> Channel:
    """A channel on which the handshake is done, and words are said; the last ones are followed by a payload."""
    channel = reach_head(head.address, head.key, 0.0, SOON_S)
    channel._connection.settimeout(SOON_S)
    head.connections.append(channel._connection)
    for each in words[:-1]:
        channel.send_plain(each)
    for each in words[-1:]:
        channel.send_plain(each, payload)
    return channel


def assert_serves(head: Served) -> None:
    """Somebody who knows the key is still heard."""
    channel = proved(head, HELLO)
    channel.send("clock", asked=7)
    answer = channel.receive()
    assert answer is not None
    assert answer["asked"] == 7
    channel.close()
    peer, hello = head.server.events.get(timeout=SOON_S)
    assert (peer.rank, hello) == (1, HELLO)
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
        halfway.sendall(TlsEnd(head.key, is_server=False).begin())
        assert halfway.recv(1)
        assert is_closed(silent)
        while halfway.recv(1 << 16):
            pass
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
        b"\x00\xff\xfe\xfd\xfc\n",
        b"[" * 3000 + b"\n",
        b'{"kind": "hello", "rank": 1, "incarnation": 0}\n',
        b"x" * (UNPROVED_BYTES + 1),
        # A record that announces more than one may have, and one of an alert.
        b"\x16\x03\x01\xff\xff" + bytes(9),
        b"\x15\x03\x03\x00\x02\x02\x28",
    ],
)
def test_garbage_ends_its_own_connection_alone(words: bytes, head: Served) -> None:
    stranger = connected(head)
    stranger.sendall(words)
    assert is_closed(stranger)
    assert_serves(head)


@pytest.mark.parametrize(
    "line", [b"\x00\xff\xfe\n", b"[]\n", b"7\n", b"[" * 3000 + b"\n", b'{"kind": "hello"}\n', b"{}\n"]
)
def test_nonsense_of_a_process_with_the_key_ends_its_connection(line: bytes, head: Served) -> None:
    channel = proved(head)
    channel._connection.sendall(channel._tls.send(line) if channel._tls is not None else b"")
    assert channel.receive() is None
    assert_serves(head)


def test_a_wrong_key_is_found_by_both_ends(head: Served) -> None:
    with pytest.raises(UnprovedHeadError, match="does not know this job's key"):
        reach_head(head.address, new_key(), 0.0, 0.0)
    # This one does not care who the head is.
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    own = identity(new_key())
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(own.pem)
        file.flush()
        anybody.load_cert_chain(file.name)
    with anybody.wrap_socket(connected(head)) as impostor:
        with suppress(OSError):
            impostor.sendall(encode(HELLO))
        with suppress(OSError):
            assert impostor.recv(1) == b""
    assert_serves(head)


class Between:
    """Somebody in the network between a rank and the head, who keeps a copy and can change it.

    Args:
        change: Returns the bytes that are passed on to the head.
    """

    def __init__(self, head: Served, change: Callable[[bytes], bytes] = lambda said: said) -> None:
        self.heard = bytearray()
        self._listening = listen(("127.0.0.1", 0))
        self.address = self._listening.getsockname()[:2]
        self._head = head
        self._change = change
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        with self._listening, self._listening.accept()[0] as near, connected(self._head) as far:
            back = threading.Thread(target=self._copy, args=(far, near, lambda said: said), daemon=True)
            back.start()
            self._copy(near, far, self._change)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while said := source.recv(1 << 16):
                self.heard += said
                target.sendall(change(said))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def test_who_listens_in_the_network_learns_nothing(head: Served) -> None:
    between = Between(head)
    channel = proved(replace(head, address=between.address), HELLO)
    peer, _ = head.server.events.get(timeout=SOON_S)
    head.server.send(peer, "plan", text="a secret plan")
    assert channel.receive() == {"kind": "plan", "text": "a secret plan"}
    channel.send("step", text="a secret loss")
    assert head.server.events.get(timeout=SOON_S) == (peer, {"kind": "step", "text": "a secret loss"})
    channel.close()
    assert head.server.events.get(timeout=SOON_S) == (peer, None)
    heard = bytes(between.heard)
    assert len(heard) > 1000
    for word in (b"hello", b"incarnation", b"kind", b"secret", head.key, head.key.hex().encode()):
        assert word not in heard


def test_who_changes_a_message_in_the_network_ends_the_connection_alone(head: Served) -> None:
    words = []

    def change(said: bytes) -> bytes:
        words.append(said)
        return said if len(words) < 4 else said[:-1] + bytes([said[-1] ^ 1])

    between = Between(head, change)
    channel = proved(replace(head, address=between.address), HELLO)
    peer, hello = head.server.events.get(timeout=SOON_S)
    assert hello == HELLO
    for _ in range(3):
        channel.send("clock", asked=1)
        if channel.receive() is None:
            break
    else:
        pytest.fail("a changed message was taken for a true one")
    assert head.server.events.get(timeout=SOON_S) == (peer, None)
    assert_serves(head)


def test_a_recorded_handshake_proves_nothing(head: Served) -> None:
    between = Between(head)
    proved(replace(head, address=between.address), HELLO).close()
    peer, _ = head.server.events.get(timeout=SOON_S)
    assert head.server.events.get(timeout=SOON_S) == (peer, None)
    replayed = connected(head)
    with suppress(OSError):
        replayed.sendall(between.heard)
        while replayed.recv(1 << 16):
            pass
    assert_serves(head)


def test_a_host_tells_a_false_head_nothing_and_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats what the true one once said, has another key, or speaks without any; and sends documents."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    heard: list[bytes] = []
    evil = encode({"kind": "welcome", "replaces": False, "documents": {"../../evil": {}}})
    with listen(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        hosts = replace(hosts_on_loopback([("here", (0,)), ("there", (1,))], arrival_s=2.0), port=port)
        recorded, client = TlsEnd(hosts.key, is_server=True), TlsEnd(hosts.key, is_server=False)
        recorded.receive(client.begin())
        answer = recorded.take()

        def answers(first: bytes) -> Iterator[bytes]:
            yield answer + evil
            other = TlsEnd(new_key(), is_server=True)
            other.receive(first)
            yield other.take() + evil
            yield evil

        def deceive() -> None:
            for number in range(3):
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    said = connection.recv(1 << 16)
                    heard.append(said)
                    connection.sendall(list(answers(said))[number])
                    while said := connection.recv(1 << 16):
                        heard.append(said)

        threading.Thread(target=deceive, daemon=True).start()
        with pytest.raises(RunError, match=f"127.0.0.1:{port}.* (does not know this job's key|cannot be reached)"):
            run_member(hosts, "there", None)
    # Of TLS, the first message of a handshake and alerts.
    assert len(heard) >= 3
    hello, alert = 0x16, 0x15
    assert {said[0] for said in heard} <= {hello, alert}
    for word in (b"there", b"hello", b"kind", hosts.key, hosts.key.hex().encode()):
        assert all(word not in said for said in heard)
    assert list(tmp_path.rglob("*evil*")) == []


@pytest.mark.parametrize(
    "hello",
    [
        *({"rank": rank, "incarnation": 0} for rank in (-1, 2, True, "1", "../1", None, 0.5, [1])),
        {"rank": 1, "incarnation": "0"},
        *({"host": host} for host in ("here", "nowhere", "../there", "/there", "", None, ["there"])),
    ],
)
def test_names_are_those_of_the_jobs_own_documents(hello: dict[str, Any], head: Served) -> None:
    assert proved(head, {"kind": "hello", **hello}).receive() is None
    assert_serves(head)


@pytest.mark.parametrize("kind", ["../parameters", "/tmp/parameters", "config", "key", "", None, 7, ["parameters"]])
def test_no_file_is_named_by_the_network(kind: object, head: Served) -> None:
    folder = head.server._job.path
    before = sorted(folder.iterdir())
    rank = proved(head, HELLO, {"kind": "file", "file": kind, "payload_bytes": 4}, payload=b"evil")
    assert rank.receive() is None
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("size", [-1, 0, 1 << 40, "4", True, None])
def test_files_have_sizes(size: object, head: Served) -> None:
    rank = proved(head, HELLO, {"kind": "file", "file": "key", "payload_bytes": size})
    assert rank.receive() is None


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


def test_a_checkpoint_waits_for_the_rows_of_its_own_session(head: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAD_ADDRESS, json.dumps([*head.address, 0.0]))
    client = ControlClient(head.server._job, 1, "rank 1")
    peer, _ = head.server.events.get(timeout=SOON_S)
    first = SessionSpec.of_run(PLAN, 2, CONFIG, "first")

    def say(kind: str, **fields: object) -> None:
        head.server.send(peer, kind, **fields)

    def is_waiting(answer: Future[bool]) -> bool:
        with suppress(TimeoutError):
            answer.result(timeout=0.2)
        return not answer.done()

    def waits(step: int) -> Future[bool]:
        answer: Future[bool] = Future()
        # A daemon, since one that waits for ever would keep the tests from ending.
        threading.Thread(target=lambda: answer.set_result(client.await_heard(step)), daemon=True).start()
        assert is_waiting(answer)
        return answer

    try:
        client.begin(first)
        early = waits(4)
        say("heard", step=3)
        assert is_waiting(early)
        say("heard", step=4)
        assert early.result(timeout=SOON_S)
        # The session ends before step 9 is heard of; the next one goes back to step 7, and does it again.
        late, kept = waits(9), waits(6)
        say("ended")
        assert not kept.result(timeout=SOON_S)
        assert not late.result(timeout=SOON_S)
        say("begin", **replace(first, number=1, first_step=7).to_data())
        assert client.await_session() is not None
        assert client.await_heard(6)
        again = waits(9)
        say("heard", step=9)
        assert again.result(timeout=SOON_S)
    finally:
        # Otherwise the end of the connection would end this process.
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
    slow = proved(head, {"kind": "hello", "rank": 0, "incarnation": 0})
    peer, _ = head.server.events.get(timeout=SOON_S)
    head.server.send(peer, "plan", text="x" * (1 << 24))
    assert_serves(head)
    plan = slow.receive()
    assert plan is not None
    assert len(plan["text"]) == 1 << 24
