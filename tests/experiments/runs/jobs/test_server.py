"""The server's interface: the token, the address, and what it refuses; each request goes over a real connection."""

import io
import json
import os
import re
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from executor.core.tls import TlsEnd
from executor.deploy.bundle import HostedRun, RunBundle
from experiments.runs.jobs import server as server_module
from experiments.runs.jobs.access import Access, find_access, listen_at, make_token, read_token, tls_of
from experiments.runs.jobs.client import Client, NoAnswerError, UnprovedServerError
from experiments.runs.jobs.host import JobHost
from experiments.runs.jobs.messages import BODY_BYTES, AttemptEnd, Heartbeat
from experiments.runs.jobs.packing import pack
from experiments.runs.jobs.server import make_app, make_server, run_server
from experiments.runs.jobs.states import Outcome
from experiments.runs.jobs.store import Store
from experiments.runs.scenario import choose_scenario
from planner.systems.registry import make_plan
from tests.helpers.networks.several_hosts import free_port
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.job_server import JobServer, job_server
from traces.common.errors import InputError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    with job_server(tmp_path_factory.mktemp("server") / "queue") as found:
        yield found


@pytest.fixture(scope="module")
def files() -> bytes:
    scenario = choose_scenario("digits")
    return pack(RunBundle(scenario, make_plan("ddp", scenario), HostedRun("real", 5, "none", 0, "", 5)))


def answer(
    served: JobServer, method: str, path: str, body: bytes | None, token: str | None
) -> tuple[int, dict[str, object]]:
    """What the server answers to somebody who knows the token for TLS, and sends another one or none in the request."""
    headers = {} if token is None else {"Authorization": token}
    request = urllib.request.Request(served.access.server + path, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(
            request, timeout=30.0, context=tls_of(served.access.token, is_server=False)
        ) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def routes(store: Store) -> list[tuple[str, str]]:
    """All that the server answers, with names and numbers filled in."""
    app = vars(make_app(store, "x" * 16))["_app"]
    assert isinstance(app, FastAPI)
    known = [route for route in app.routes if isinstance(route, APIRoute)]
    assert len(known) == len(app.routes), "a route that no test knows"
    filled = {"{job}": "job-1", "{host}": "host-1", "{attempt}": "1"}
    found = []
    for route in known:
        path = route.path
        for name, value in filled.items():
            path = path.replace(name, value)
        found += [(method, path) for method in route.methods]
    return found


def test_nothing_is_answered_without_the_token(served: JobServer, tmp_path: Path) -> None:
    token = served.access.token
    store = Store(tmp_path, 1.0, 0.0)
    asked = [*routes(store), ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"), ("OPTIONS", "/jobs")]
    store.close()
    assert len(asked) > 12
    wrong = [None, "", token, "Bearer", "Bearer ", f"Bearer {token[:-1]}", f"Bearer {token}x", f"Basic {token}"]
    for method, path in asked:
        for given in wrong:
            status, body = answer(served, method, path, b"", given)
            assert (status, body) == (401, {"error": "this request carries no valid token"}), (method, path, given)
    status, _ = answer(served, "GET", "/jobs", None, f"Bearer {token}")
    assert status == 200


def test_a_job_is_kept_once_however_often_it_is_sent(served: JobServer, files: bytes) -> None:
    client = served.client
    first = client.submit("once", files)
    assert (first["state"], first["devices"], first["steps"]) == ("queued", {"cpu": 2}, 5)
    assert client.submit("once", files)["submitted_s"] == first["submitted_s"]
    assert client.files("once") == files
    assert [job["id"] for job in client.jobs()["jobs"]].count("once") == 1
    scenario = choose_scenario("digits")
    other = pack(RunBundle(scenario, make_plan("ddp", scenario), HostedRun("real", 6, "none", 0, "", 5)))
    with pytest.raises(InputError, match="another job 'once'"):
        client.submit("once", other)


def changed(files: bytes, name: str, content: bytes | None) -> bytes:
    """The job with another content of a file, or without the file."""
    body = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(files)) as old, zipfile.ZipFile(body, "w") as new:
        for entry in old.infolist():
            if entry.filename != name:
                new.writestr(entry.filename, old.read(entry))
        if content is not None:
            new.writestr(name, content)
    return body.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("../../evil.py", b"", "no job has a file"),
        ("weights/../../evil", b"", "no job has a file"),
        ("/etc/passwd", b"", "no job has a file"),
        ("run.json", None, "it lacks run.json"),
        ("run.json", b"{}", "HostedRun.compute: Field required"),
        ("run.json", b"[", "HostedRun: Invalid JSON"),
        ("plan.json", b"{}", "plan.json: "),
        ("scenario.json", b"{}", "scenario.json: this is not a resolved scenario"),
    ],
)
def test_a_wrong_job_is_refused_in_one_line(
    served: JobServer, files: bytes, name: str, content: bytes | None, message: str
) -> None:
    with pytest.raises(InputError) as refused:
        served.client.submit("wrong", changed(files, name, content))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "/tmp" not in str(refused.value)
    with pytest.raises(InputError, match="no job 'wrong'"):
        served.client.job("wrong")


def test_what_is_no_job_is_refused(served: JobServer, files: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(files)) as packed:
        entry = packed.getinfo("scenario.json")
    begins = entry.header_offset + 30 + len(entry.filename) + 10
    damaged = files[:begins] + bytes([255] * 20) + files[begins + 20 :]
    for body in (b"", b"text", files[: len(files) // 2], damaged):
        with pytest.raises(InputError, match="this is no job"):
            served.client.submit("wrong", body)
    token = f"Bearer {served.access.token}"
    for method, path, body, status in (
        ("PUT", "/jobs/wrong", bytes(BODY_BYTES + 1), 413),
        ("PUT", "/jobs/Wrong_Name", files, 422),
        ("GET", "/jobs/none", None, 404),
        ("POST", "/hosts/one", b'{"incarnation": -1}', 422),
        ("PUT", "/jobs/none/attempts/1/log?first_byte=x", b"", 422),
    ):
        assert answer(served, method, path, body, token)[0] == status, (method, path)


def test_a_host_gets_jobs_and_only_its_newest_attempt_counts(tmp_path: Path, files: bytes) -> None:
    with job_server(tmp_path / "queue") as served:
        client = served.client
        client.submit("job", files)
        client.hear("one", Heartbeat(7, {"cpu": 1}, []))
        with pytest.raises(InputError, match="another process is the host 'one' now"):
            client.hear("one", Heartbeat(6, {"cpu": 1}, []))
        assert client.job("job")["reason"] == "no host that was heard offers these devices"
        (given,) = client.hear("two", Heartbeat(1, {"cpu": 2}, [])).attempts
        assert (given.job, given.attempt) == ("job", 1)
        # A process that begins anew has lost what its predecessor ran.
        (again,) = client.hear("two", Heartbeat(2, {"cpu": 2}, [])).attempts
        assert again.attempt == 2
        assert not client.end("job", AttemptEnd(1, Outcome.FINISHED, "", 5))
        assert client.job("job")["state"] == "running"
        assert client.add_log("job", 2, 0, b"hello") == 5
        assert client.end("job", AttemptEnd(2, Outcome.FINISHED, "", 5))
        assert client.end("job", AttemptEnd(2, Outcome.FINISHED, "", 5))
        assert client.log("job", 2, 0) == b"hello"
        done = client.job("job")
        assert [event["state"] for event in done["events"]] == ["queued", "running", "queued", "running", "finished"]


def test_the_token_is_random_and_its_owner_alone_can_read_it(tmp_path: Path) -> None:
    tokens = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tokens.add(make_token(tmp_path / name, {}))
        assert (tmp_path / name / "token").stat().st_mode & 0o777 == 0o600
        assert make_token(tmp_path / name, {}) in tokens
    assert len(tokens) == 2
    assert make_token(tmp_path / "one", {"ROPEBRIDGE_TOKEN": "a" * 16}) == "a" * 16
    path = tmp_path / "one" / "token"
    path.chmod(0o640)
    with pytest.raises(InputError, match="other users can read the token"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(InputError, match="this is no token"):
        read_token(path)


def test_the_environment_names_server_and_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("b" * 20)
    path.chmod(0o600)
    there = {"ROPEBRIDGE_SERVER": "https://10.7.0.1:29500/", "ROPEBRIDGE_TOKEN_FILE": str(path)}
    assert find_access(None, None, there) == Access("https://10.7.0.1:29500", "b" * 20)
    assert find_access("https://[fd00::1]:5", None, {"ROPEBRIDGE_TOKEN": "c" * 20}).server == "https://[fd00::1]:5"
    with pytest.raises(InputError, match="no address of a server"):
        find_access("10.7.0.1", path, {})
    for wrong in (
        "http://10.7.0.1:29500",
        "https://[::1",
        "https://a:b",
        "https://a:99999",
        "https://a?x",
        "https://a b",
        "https://a:",
        "https://a#",
    ):
        with pytest.raises(InputError, match="write it as https://"):
            find_access(wrong, path, {})


def test_a_false_server_is_told_nothing(served: JobServer) -> None:
    """It listens in the server's place, speaks TLS with a certificate of its own, or does not; the client has a job."""
    heard = bytearray()

    def deceive(listening: socket.socket, tls: TlsEnd | None) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError, ssl.SSLError):
            while said := connection.recv(1 << 16):
                heard.extend(said)
                if tls is not None:
                    heard.extend(tls.receive(said))
                    connection.sendall(tls.take())
                else:
                    connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

    for tls in (None, TlsEnd(b"another token", is_server=True)):
        with listen_at("127.0.0.1", free_port()) as listening:
            threading.Thread(target=deceive, args=(listening, tls), daemon=True).start()
            host, port = listening.getsockname()
            client = Client(replace(served.access, server=f"https://{host}:{port}"))
            with pytest.raises(UnprovedServerError, match="does not know this token"):
                client.submit("job", b"the files of a job")
    for word in (served.access.token.encode(), b"Bearer", b"/jobs", b"the files"):
        assert word not in heard


def test_a_host_outlives_a_false_server(served: JobServer, tmp_path: Path) -> None:
    """While the true one is away, another process takes its port: what the host runs goes on."""
    with job_server(tmp_path / "queue") as true:
        lines: list[str] = []
        host = JobHost(true.client, "host", {"cpu": 1}, tmp_path, tmp_path, lines.append)
        host._exchange()
    assert lines == ["host host: the server has answered"]
    port = int(true.access.server.rpartition(":")[2])
    with listen_at("127.0.0.1", port) as listening:
        other = make_server(make_app(served.store, "y" * 16), "y" * 16)
        thread = threading.Thread(target=run_server, args=(other, listening))
        thread.start()
        host._exchange()
        other.should_exit = True
        thread.join()
    assert "does not know this token" in lines[-1]
    assert lines[-1].endswith("what runs goes on")


def test_idle_strangers_keep_nobody_from_the_server(served: JobServer) -> None:
    place = ("127.0.0.1", int(served.access.server.rpartition(":")[2]))
    with ExitStack() as stack:
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection(place))
            if number % 3 == 0:
                stranger.sendall(b"GET /jobs HTTP/1.1\r\n")
        assert "jobs" in served.client.jobs()


def test_a_server_that_is_away_is_not_taken_for_one_that_refuses() -> None:
    client = Client(Access(f"https://127.0.0.1:{free_port()}", "x" * 16))
    with pytest.raises(NoAnswerError, match="no server answers"):
        client.jobs()


CHECKPOINTS = ("--checkpoint-every", "2")
SERVE = ("serve", "queue", "--listen")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SERVE, "0.0.0.0:29500"), "'0.0.0.0' stands for all addresses"),
        ((*SERVE, "[::]:29500"), "'::' stands for all addresses"),
        ((*SERVE, "203.0.113.1:29500"), "no server can listen here"),
        ((*SERVE, "a b"), "is not an address"),
        (("serve", "queue", "--lease", "0.1 s"), "--lease: 0.1 s is not allowed"),
        (("serve", "queue", "--lease", "5"), "--lease: '5' has no unit"),
        (("jobs", "status"), "the server asks for a token"),
        (("jobs", "status", "--token-file", "none"), "none: the token cannot be read"),
        (("jobs", "work", "Host", "--shared", ".", "--token-file", "t"), "HOST: 'Host' is no name"),
        (("jobs", "work", "host", "--shared", "none", "--token-file", "t"), "there is no such folder"),
        (("jobs", "work", "host", "--shared", ".", "--device", "cpu"), "'cpu' is no assignment"),
        (("jobs", "work", "host", "--shared", ".", "--device", "cpu=x"), "'cpu=x' is no number of devices"),
        (("jobs", "submit", "nowhere", "--token-file", "t"), "unknown scenario 'nowhere'"),
        (("jobs", "submit", "digits", "--token-file", "t", "--name", "A"), "--name: 'A' is no name"),
        (
            ("jobs", "submit", "digits", "--token-file", "t", "--strategy", "ddp", "--compute", "paced", *CHECKPOINTS),
            "--checkpoint-every: paced compute has no state for checkpoints",
        ),
    ],
)
def test_wrong_input_is_refused_with_status_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "t").touch(mode=0o600)
    (tmp_path / "t").write_text("t" * 20)
    done = ropebridge(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_refused(tmp_path: Path, served: JobServer) -> None:
    done = ropebridge("serve", "queue", "--listen", served.access.server.removeprefix("https://"), cwd=tmp_path)
    assert done.returncode == 2
    assert "no server can listen here: Address already in use" in done.stderr
    assert not (tmp_path / "queue").exists()


def test_a_wrong_token_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEBRIDGE_TOKEN", "short")
    done = ropebridge("serve", "queue", "--listen", f"127.0.0.1:{free_port()}", cwd=tmp_path)
    assert (done.returncode, "ROPEBRIDGE_TOKEN: this is no token" in done.stderr) == (2, True)
    assert not list(tmp_path.iterdir())


def test_without_its_packages_the_server_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, server_module.__name__)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = ropebridge("serve", "queue", cwd=tmp_path)
    assert done.returncode == 2
    assert "needs fastapi, which is not installed; pip install 'ropebridge[serve]'" in done.stderr


def test_users_see_and_stop_jobs(served: JobServer, tmp_path: Path) -> None:
    options = served.options
    done = ropebridge("jobs", "submit", "digits", "--strategy", "ddp", "--name", "mine", *options, cwd=tmp_path)
    assert done.stdout == "job mine is queued; next: ropebridge jobs status mine\n", done.stderr
    done = ropebridge("jobs", "submit", "digits", "--strategy", "ddp", "--compute", "paced", *options, "--json")
    paced = json.loads(done.stdout)
    assert paced["id"].startswith("digits-")
    assert "this job writes no checkpoints" in done.stderr
    listed = json.loads(ropebridge("jobs", "status", *options, "--json").stdout)
    assert {"mine", paced["id"]} <= {job["id"] for job in listed["jobs"]}
    assert "no host that was heard offers these devices" in ropebridge("jobs", "status", "mine", *options).stdout
    done = ropebridge("jobs", "logs", "mine", *options)
    assert (done.returncode, "it has not begun" in done.stderr) == (2, True)
    done = ropebridge("jobs", "stop", "mine", paced["id"], *options)
    assert done.stdout == f"job mine is stopped\njob {paced['id']} is stopped\n"
    assert json.loads(ropebridge("jobs", "stop", "mine", *options, "--json").stdout) == {"mine": "stopped"}
    ropebridge("jobs", "submit", "digits", "--strategy", "ddp", "--name", "yours", *options, cwd=tmp_path)
    done = ropebridge("jobs", "stop", "yours", "none", *options)
    assert "queued" in ropebridge("jobs", "status", "yours", *options).stdout
    assert (done.returncode, done.stderr) == (
        2,
        "ropebridge: there is no job 'none'; 'ropebridge jobs status' lists all\n",
    )
    other = tmp_path / "token"
    other.touch(mode=0o600)
    other.write_text("x" * 30)
    done = ropebridge("jobs", "status", "--server", served.access.server, "--token-file", other)
    assert (done.returncode, "does not know this token" in done.stderr) == (1, True)
    done = ropebridge("jobs", "work", "host", "--shared", tmp_path, *options[:2], "--token-file", other)
    assert (done.returncode, "does not know this token" in done.stderr) == (2, True)
    served.client.hear("a-host", Heartbeat(1, {"h100": 8}, []))
    assert re.search(r"^a-host +8 h100$", ropebridge("jobs", "status", *options).stdout, re.MULTILINE)


def test_tests_do_not_depend_on_the_users_environment() -> None:
    assert not {"ROPEBRIDGE_TOKEN", "ROPEBRIDGE_TOKEN_FILE", "ROPEBRIDGE_SERVER"} & set(os.environ)
