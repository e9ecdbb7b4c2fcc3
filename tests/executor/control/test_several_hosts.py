"""A job on several hosts, each with files of its own, trains as one process does, and outlives the loss of a host."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.core.liveness import beat_path
from executor.training.device import cpu_name, gpu_names
from experiments.benches.processes import MARK, marked_processes
from planner.runs.event_totals import step_ends_s
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from tests.helpers.networks.several_hosts import free_port, hosts_on_loopback, start_member
from tests.helpers.processes.blows import await_step
from tests.helpers.processes.command import COMMAND, ropebridge
from tests.helpers.processes.training import assert_trained, chain, train_in_one_process
from traces.common.errors import InputError, RunError

STEPS = 12


def said_at_end(member: "subprocess.Popen[str]") -> str:
    """What a host's part has to say against the run."""
    _, said = member.communicate(timeout=20)
    assert member.returncode == 0, said
    return said


def of_kind(scenario: Scenario, kind: str, names: Collection[str]) -> Scenario:
    """The scenario with devices of another kind, which takes the same times."""
    devices = tuple(replace(each, kind=kind) if each.name in names else each for each in scenario.cluster.devices)
    layers = tuple(
        replace(each, times={**each.times, kind: next(iter(each.times.values()))}) for each in scenario.model.layers
    )
    return replace(
        scenario,
        cluster=Cluster(devices, scenario.cluster.links),
        model=replace(scenario.model, layers=layers),
    )


@pytest.mark.slow
def test_hosts_train_together(tmp_path: Path) -> None:
    """The head has none of the first stage's ranks: rank 0 is elsewhere, and on another kind of device than planned."""
    scenario, plan = chain()
    scenario = of_kind(scenario, "p4000", {"device-0", "device-2"})
    hosts = hosts_on_loopback([("west", (1, 3)), ("east", (0, 2))])
    target = tmp_path / "parameters.safetensors"
    member = start_member(hosts, "east", tmp_path / "east", scenario.code.path)
    lines: list[str] = []
    backend = TorchBackend(
        "real", parameters=target, resources=tmp_path, hosts=hosts, on_this_device=True, tell=lines.append
    )
    record = backend.run(scenario, plan, None, STEPS)
    assert_trained(record, target, train_in_one_process(scenario, STEPS))
    assert record.computed_on == [*gpu_names(), cpu_name()][0]
    assert said_at_end(member) == ""
    (clear,) = [line for line in lines if "in the clear" in line]
    assert "tensors are sent by gloo in the clear, over the interfaces of west (lo), east (lo)" in clear
    assert clear.endswith("on this host lo is no interface of WireGuard")
    assert sorted(path.name for path in tmp_path.glob("resources-*")) == [
        f"resources-{rank}.jsonl" for rank in range(4)
    ]
    assert list((tmp_path / "east").glob("ropebridge-*")) == []


@pytest.mark.slow
def test_a_host_with_another_kind_of_device_is_named(tmp_path: Path) -> None:
    scenario, plan = chain()
    hosts = hosts_on_loopback([("west", (1, 3)), ("east", (0, 2))])
    scenario = of_kind(scenario, "p4000", {"device-0"})
    member = start_member(hosts, "east", tmp_path / "east", scenario.code.path)
    where = (
        r"^rank 0 \(device 'device-0', host .*\): --compute real: the scenario gives a device of the kind 'p4000', but"
    )
    with pytest.raises(InputError, match=where):
        TorchBackend("real", hosts=hosts).run(scenario, plan, None, STEPS)
    member.communicate(timeout=20)


@pytest.mark.slow
def test_a_head_with_an_address_of_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    scenario, plan = chain()
    hosts = replace(hosts_on_loopback([("west", (0, 1)), ("east", (2, 3))]), address="::1")
    member = start_member(hosts, "east", tmp_path / "east", None)
    record = TorchBackend("paced", backup_every=1, hosts=hosts).run(scenario, plan, None, STEPS)
    assert len(step_ends_s(record.events)) == STEPS
    assert said_at_end(member) == ""


@pytest.mark.slow
def test_a_host_that_is_lost_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a job of H hosts and N ranks has H agents and N ranks beside the launcher, which is this process."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = chain()
    hosts = hosts_on_loopback([("west", (0, 1, 2)), ("east", (3,))])
    target, steps = tmp_path / "parameters.safetensors", 40
    members = [start_member(hosts, "east", tmp_path / "east", scenario.code.path)]
    processes: list[str] = []

    def strike() -> None:
        await_step(tmp_path, 0, 4)
        processes.extend(marked_processes(mark).values())
        members[0].send_signal(signal.SIGKILL)
        members[0].communicate()
        members.append(start_member(hosts, "east", tmp_path / "east", scenario.code.path))

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    backend = TorchBackend("real", parameters=target, backup_every=1, hosts=hosts)
    record = backend.run(scenario, plan, None, steps)
    striker.join()
    assert len(processes) == 2 + 4, processes
    assert sum("-m executor.rank.worker " in each for each in processes) == 4, processes
    assert_trained(record, target, train_in_one_process(scenario, steps))
    assert said_at_end(members[1]) == ""


@pytest.mark.slow
def test_a_host_that_is_lost_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = chain()
    hosts = hosts_on_loopback([("west", (0, 1, 2)), ("east", (3,))])
    member = start_member(hosts, "east", tmp_path / "east", scenario.code.path)

    def strike() -> None:
        await_step(tmp_path, 0, 4)
        member.send_signal(signal.SIGKILL)
        member.communicate()

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    with pytest.raises(RunError, match=r"rank 3 \(device 'device-3', host east\) is lost.*use '--backup-every'"):
        TorchBackend("real", hosts=hosts).run(scenario, plan, None, 2000)
    striker.join()


def test_a_host_that_does_not_come_is_named() -> None:
    scenario, plan = chain()
    hosts = hosts_on_loopback([("west", (0, 1)), ("east", (2, 3))], arrival_s=2.0)
    with pytest.raises(RunError, match=r"host east: no agent has connected within 2 s; start .*127\.0\.0\.1"):
        TorchBackend("paced", hosts=hosts).run(scenario, plan, None, STEPS)


@pytest.mark.slow
def test_a_host_that_is_lost_before_the_first_step_must_come_back_in_time(tmp_path: Path) -> None:
    """Also in a run that survives lost hosts: before any step there is nothing that is worth waiting for."""
    scenario, plan = chain()
    hosts = hosts_on_loopback([("west", (0, 1, 2)), ("east", (3,))], arrival_s=10.0)
    member = start_member(hosts, "east", tmp_path / "east", scenario.code.path)

    def strike() -> None:
        while not list((tmp_path / "east").rglob(beat_path(Path(), 3).name)):
            time.sleep(0.002)
        member.send_signal(signal.SIGKILL)
        member.communicate()

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    with pytest.raises(RunError, match="host east: no agent has connected within 10 s"):
        TorchBackend("real", hosts=hosts, backup_every=2).run(scenario, plan, None, STEPS)
    striker.join()


@pytest.mark.slow
def test_a_model_that_differs_on_a_host_is_found(tmp_path: Path) -> None:
    scenario, plan = chain()
    other = tmp_path / "model.py"
    other.write_text(scenario.code.path.read_text() + "\n# not the same\n")
    hosts = hosts_on_loopback([("west", (0, 1)), ("east", (2, 3))])
    member = start_member(hosts, "east", tmp_path / "east", other)
    with pytest.raises(RunError, match="model file"):
        TorchBackend("real", hosts=hosts).run(scenario, plan, None, STEPS)
    _, said = member.communicate(timeout=30)
    assert member.returncode == 1
    assert "model file" in said


@pytest.mark.slow
def test_checkpoints_in_a_folder_that_hosts_do_not_share_are_refused(tmp_path: Path) -> None:
    scenario, plan = chain()
    shared, hosts = tmp_path / "checkpoints", hosts_on_loopback([("west", (0, 1)), ("east", (2, 3))])
    shared.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no mounts of one's own")
    # Another disk at the same place.
    elsewhere = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {shared} && exec "$@"', "sh"]
    member = start_member(hosts, "east", tmp_path / "east", scenario.code.path, elsewhere, str(shared))
    backend = TorchBackend("real", checkpoints=CheckpointConfig(shared, 5), hosts=hosts)
    with pytest.raises(InputError, match=r"not the same folder as on the head.*a folder that all hosts share"):
        backend.run(scenario, plan, None, STEPS)
    _, said = member.communicate(timeout=30)
    assert member.returncode == 1
    assert str(shared) in said


@pytest.mark.slow
def test_a_head_that_is_killed_goes_on_and_the_others_have_waited(tmp_path: Path) -> None:
    """As `deploy --target torchrun` says: the head's part by ropebridge, the other one's by torchrun."""
    entry = {"interface": "lo", "command": COMMAND[0]}
    hosts = {"north-worker": {**entry, "address": "127.0.0.1"}, "south-worker": entry}
    described = {"hosts": hosts, "port": free_port(), "arrival": "90 s", "silence": "8 s"}
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(described))
    folder = tmp_path / "job-1"
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
            folder,
        ),
        *("--steps", 400, "--checkpoint", tmp_path / "checkpoints", "--checkpoint-every", 20),
    )
    assert done.returncode == 0, done.stderr
    commands = (folder / "commands.sh").read_text()
    theirs = f"PATH={Path(sys.executable).parent}:$PATH; {commands.partition('south-worker')[2]}"
    member = subprocess.Popen(["bash", "-c", theirs], cwd=folder, stderr=subprocess.PIPE, text=True)
    lead = [*COMMAND, "host", "job", "north-worker"]
    head = subprocess.Popen(lead, cwd=folder, stderr=subprocess.PIPE, text=True)
    while len(list((tmp_path / "checkpoints").glob("step-*"))) < 3:
        assert head.poll() is None, head.communicate()
        time.sleep(0.1)
    head.kill()
    head.communicate()
    resumed = subprocess.run([*lead, "--resume"], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from the checkpoint of step" in resumed.stderr
    assert said_at_end(member) is not None
    summary = json.loads((folder / "job" / "run" / "summary.json").read_text())
    assert summary["losses"][-1] < 0.5
