"""The server's interface: the token, the address, and what it refuses; each request goes over a real connection."""

import io
import json
import os
import re
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from executor.deploy.bundle import HostedRun, RunBundle
from experiments.runs.jobs import server as server_module
from experiments.runs.jobs.access import Access, find_access, make_token, read_token
from experiments.runs.jobs.client import Client, NoAnswerError
from experiments.runs.jobs.messages import BODY_BYTES, AttemptEnd, Heartbeat
from experiments.runs.jobs.packing import pack
from experiments.runs.jobs.server import make_app
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


def answer(method: str, url: str, body: bytes | None, token: str | None) -> tuple[int, dict[str, object]]:
    headers = {} if token is None else {"Authorization": token}
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30.0) as found:
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
            status, body = answer(method, served.access.server + path, b"", given)
            assert (status, body) == (401, {"error": "this request carries no valid token"}), (method, path, given)
    status, _ = answer("GET", served.access.server + "/jobs", None, f"Bearer {token}")
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
    for body in (b"", b"text", files[: len(files) // 2]):
        with pytest.raises(InputError, match="this is no job"):
            served.client.submit("wrong", body)
    url, token = f"{served.access.server}/jobs/", f"Bearer {served.access.token}"
    assert answer("PUT", url + "wrong", bytes(BODY_BYTES + 1), token)[0] == 413
    assert answer("PUT", url + "Wrong_Name", files, token)[0] == 422
    assert answer("GET", url + "none", None, token)[0] == 404
    assert answer("POST", url[:-5] + "hosts/one", b'{"incarnation": -1}', token)[0] == 422
    assert answer("PUT", url + "none/attempts/1/log?first_byte=x", b"", token)[0] == 422


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
    there = {"ROPEBRIDGE_SERVER": "http://10.7.0.1:29500/", "ROPEBRIDGE_TOKEN_FILE": str(path)}
    assert find_access(None, None, there) == Access("http://10.7.0.1:29500", "b" * 20)
    assert find_access("http://[fd00::1]:5", None, {"ROPEBRIDGE_TOKEN": "c" * 20}).server == "http://[fd00::1]:5"
    with pytest.raises(InputError, match="no address of a server"):
        find_access("10.7.0.1", path, {})


def test_a_server_that_is_away_is_not_taken_for_one_that_refuses() -> None:
    client = Client(Access(f"http://127.0.0.1:{free_port()}", "x" * 16))
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
            "paced compute has no state for checkpoints",
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
    done = ropebridge("serve", "queue", "--listen", served.access.server.removeprefix("http://"), cwd=tmp_path)
    assert done.returncode == 2
    assert "no server can listen here: Address already in use" in done.stderr


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
    done = ropebridge("jobs", "stop", "none", *options)
    assert (done.returncode, done.stderr) == (
        2,
        "ropebridge: there is no job 'none'; 'ropebridge jobs status' lists all\n",
    )
    other = tmp_path / "token"
    other.touch(mode=0o600)
    other.write_text("x" * 30)
    done = ropebridge("jobs", "status", "--server", served.access.server, "--token-file", other)
    assert (done.returncode, "the server refuses the token" in done.stderr) == (2, True)
    served.client.hear("a-host", Heartbeat(1, {"h100": 8}, []))
    assert re.search(r"^a-host +8 h100$", ropebridge("jobs", "status", *options).stdout, re.MULTILINE)


def test_tests_do_not_depend_on_the_users_environment() -> None:
    assert not {"ROPEBRIDGE_TOKEN", "ROPEBRIDGE_TOKEN_FILE", "ROPEBRIDGE_SERVER"} & set(os.environ)
