"""The tutorial, as somebody new would follow it: on emulated hosts with an sshd each, over a link that sways."""

import json
import re
import time
from pathlib import Path

import pytest

from executor.wan.testbed import INTERFACE, device_address
from tests.helpers.networks.emulated_hosts import EmulatedHost, EmulatedHosts, lacking

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"

# A link that drops to an eighth for a third of the time.
LINKS = """
    - between: [berlin, workshop]
      latency: 15 ms
      trace: {after: loop, duration: 45 s, steps: [{at: 0 s, bandwidth: 80 Mbit/s}, {at: 30 s, bandwidth: 10 Mbit/s}]}
"""
# Step by which the power of a host goes.
LOST_AT_STEP = 8


def blocks() -> dict[str, str]:
    """The commands of each section, as they are for the emulated hosts."""
    text = TUTORIAL.read_text()
    for old, new in (("10.7.0.1", device_address(0)), ("10.7.0.2", device_address(1)), ("wg0", INTERFACE)):
        text = text.replace(old, new)
    found = {}
    for section in text.split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        found[title[0]] = "\n".join(re.findall(r"```bash\n(.*?)```", rest, re.DOTALL))
    return found


def test_the_first_hour(tmp_path: Path) -> None:
    if (lack := lacking()) is not None:
        pytest.skip(lack)
    hosts = [EmulatedHost("berlin", 0.9), EmulatedHost("workshop", 0.5)]
    with EmulatedHosts(tmp_path, hosts, LINKS) as emulated:
        steps = blocks()
        for number in "12345":
            done = emulated.run(f"set -e\n{steps[number]}", timeout_s=400)
            assert done.returncode == 0, f"section {number}: {done.stdout}\n{done.stderr}"
        deadline_s = time.monotonic() + 300
        while steps_done(emulated) < LOST_AT_STEP:
            assert time.monotonic() < deadline_s, emulated.run("ropebridge logs job-1").stdout
            time.sleep(0.5)
        emulated.kill("workshop")
        assert "out of reach" in emulated.run("ropebridge status job-1").stdout
        emulated.boot("workshop")
        done = emulated.run(f"set -e\n{steps['6']}")
        assert done.returncode == 0, done.stderr
        while "running" in (said := emulated.run("ropebridge status job-1").stdout):
            assert time.monotonic() < deadline_s, said
            time.sleep(2)
        done = emulated.run(f"set -e\n{steps['7']}")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{emulated.run('ropebridge logs job-1').stdout}"
    summary = json.loads((tmp_path / "desk" / "runs" / "real" / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["decisions"] >= 1
    assert summary["losses"][-1] < summary["losses"][0]
    assert "<html" in (tmp_path / "desk" / "first-hour.html").read_text()[:2000]


def steps_done(emulated: EmulatedHosts) -> int:
    """What the head's log says last."""
    said = re.findall(r"step (\d+) of", emulated.run("ropebridge logs job-1 -n 5").stdout)
    return int(said[-1]) if said else 0
