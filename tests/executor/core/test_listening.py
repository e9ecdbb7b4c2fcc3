"""gloo authenticates nobody: what a run opens is reached over the interface that was named alone."""

import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.networks.several_hosts import free_port
from tests.helpers.processes.command import COMMAND, ropebridge
from tests.helpers.processes.process_watch import addresses_listened_at, started, started_process, wait_until

LOOPBACK = {"127.0.0.1"}
# Longer than anybody waits.
STEPS = ["--steps", "1000000", "--checkpoint-every", "1"]


@pytest.mark.slow
def test_ranks_of_one_machine(tmp_path: Path) -> None:
    """With launcher, agent, and the ranks' connections; control/test_strangers.py looks at another plan's, quickly."""
    checkpoints = tmp_path / "checkpoints"
    options = ["--strategy", "ddp", "--backup-every", "5", "--checkpoint", str(checkpoints), *STEPS]
    with started(["run", "digits", "--strategy=megatron", *options], tmp_path) as (process, mark):
        wait_until(lambda: list(checkpoints.glob("step-*")), "nothing is trained")
        assert addresses_listened_at(mark) == LOOPBACK
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.mark.slow
def test_hosts_where_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    entry = {"interface": "lo", "command": COMMAND[0]}
    hosts = {"north-worker": {**entry, "address": "127.0.0.1"}, "south-worker": entry}
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "port": free_port()}))
    checkpoints = tmp_path / "checkpoints"
    options = ["--strategy", "ddp", "--checkpoint", str(checkpoints), *STEPS]
    done = ropebridge(
        *(
            "deploy",
            "digits",
            "--strategy=megatron",
            "--target",
            "torchrun",
            "--hosts",
            tmp_path / "hosts.yaml",
            "-o",
            tmp_path / "job-1",
        ),
        *options,
    )
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "job-1" / "commands.sh").read_text()
    member = f"cd {tmp_path}/job-1; PATH={Path(sys.executable).parent}:$PATH; {commands.partition('south-worker')[2]}"
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    lead = [*COMMAND, "host", str(tmp_path / "job-1" / "job"), "north-worker"]
    with started_process(["bash", "-c", member], tmp_path / "far") as (far, far_mark):
        with started_process(lead, tmp_path / "near") as (near, near_mark):
            wait_until(lambda: list(checkpoints.glob("step-*")), "nothing is trained")
            assert addresses_listened_at(near_mark) == LOOPBACK
            assert addresses_listened_at(far_mark) == LOOPBACK
            near.send_signal(signal.SIGINT)
            near.communicate(timeout=60)
        far.communicate(timeout=60)
