"""`deploy --target ssh` on emulated hosts: what runs is left alone, secrets arrive, and stop ends everything."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from executor.wan.testbed import INTERFACE, device_address
from tests.helpers.networks.emulated_hosts import EmulatedHost, EmulatedHosts, lacking

pytestmark = pytest.mark.slow

LINKS = """
    - between: [north-worker, south-worker]
      latency: 5 ms
      bandwidth: 100 Mbit/s
"""
DEPLOY = "ropebridge deploy digits --strategy ddp --steps 1000000 --target ssh --hosts hosts.yaml -o job-1 --submit"


def assert_nowhere(secret: str, folder: Path) -> None:
    """No file below a folder, and no command line, has it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert secret.encode() not in place.read_bytes().replace(b"\0", b" ")


def test_a_job_over_ssh(tmp_path: Path) -> None:
    if (lack := lacking()) is not None:
        pytest.skip(lack)
    entry = {"interface": INTERFACE}
    hosts = {"north-worker": {**entry, "address": device_address(0)}, "south-worker": entry}
    with EmulatedHosts(tmp_path, [EmulatedHost("north-worker", 0.8), EmulatedHost("south-worker", 0.8)], LINKS) as desk:
        (tmp_path / "desk" / "hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "secrets": ["MY_TOKEN"]}))
        done = desk.run(DEPLOY)
        assert done.returncode == 2
        assert "the variable 'MY_TOKEN' is not set" in done.stderr
        done = desk.run(f"rm -rf job-1; export MY_TOKEN='it is $HOME'; {DEPLOY}")
        assert done.returncode == 0, done.stderr
        deadline_s = time.monotonic() + 120
        while "step " not in desk.run("ropebridge logs job-1").stdout:
            assert time.monotonic() < deadline_s, desk.run("ropebridge logs job-1").stdout
            time.sleep(1)
        running = desk.run("ropebridge status job-1").stdout
        assert running.count("running") == 2, running
        pid = (tmp_path / "south-worker" / "ropebridge-jobs" / "job-1" / "south-worker.pid").read_text().strip()
        assert b"MY_TOKEN=it is $HOME\0" in Path(f"/proc/{pid}/environ").read_bytes()
        assert_nowhere("it is $HOME", tmp_path)
        again = desk.run("export MY_TOKEN=x; bash job-1/submit.sh south-worker")
        assert again.returncode != 0
        assert "south-worker: runs already" in again.stderr
        stopped = desk.run("ropebridge stop job-1")
        assert stopped.returncode == 0, stopped.stderr
        assert "north-worker: stopped" in stopped.stdout
        assert "running" not in desk.run("ropebridge status job-1").stdout
        assert desk.run("ropebridge stop job-1").stdout.count("had ended") == 2
        desk.kill("south-worker")
        missed = desk.run("ropebridge stop job-1")
        assert missed.returncode == 1
        assert "north-worker: had ended" in missed.stderr
        assert "south-worker: out of reach" in missed.stderr
