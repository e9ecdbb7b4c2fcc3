"""Hosts on this machine: a network namespace, an sshd, a home folder and a share of the processor each.

Run in the network of a control host as ``python emulated_hosts.py FOLDER``, it brings them up, says so by a line,
and takes them down when its standard input ends. `EmulatedHosts` starts it, and does what a person does at a desk.
"""

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from executor.core.clock import announce_origin, create_origin
from executor.core.job import JobFolder, RunConfig
from executor.core.subprocesses import die_with_parent
from executor.wan.linux import enter_network
from executor.wan.testbed import device_address, missing, running_relay
from planner.files.scenario import read_scenario
from planner.systems.registry import make_plan

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
BIN = Path(sys.executable).parent
SSHD = Path("/usr/sbin/sshd")


@dataclass(frozen=True)
class EmulatedHost:
    """What makes one unlike the others: its share of a core."""

    name: str
    cores: float


def lacking() -> str | None:
    """What this machine lacks for emulated hosts, in a sentence."""
    if (lack := missing()) is not None:
        return lack
    if os.geteuid() != 0:
        return "sshd in namespaces of their own are started by root"
    if not SSHD.exists():
        return "there is no sshd (Debian: apt-get install openssh-server)"
    probe = CGROUPS / f"ropebridge-{os.getpid()}"
    try:
        probe.mkdir()
        (probe / "cpu.cfs_quota_us").write_text(str(PERIOD_US))
    except OSError as error:
        return f"shares of the processor need cgroups: {error}"
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
    return None


class EmulatedHosts:
    """Brings the hosts up, and their links, which are those of a scenario whose devices have the hosts' names."""

    def __init__(self, folder: Path, hosts: list[EmulatedHost], links: str) -> None:
        self.folder = folder
        self.desk = folder / "desk"
        self._hosts = {host.name: host for host in hosts}
        for place in (self.desk, folder / "bin", *(folder / host.name for host in hosts)):
            place.mkdir()
        devices = "\n".join(f"    - {{name: {host.name}, kind: t4, region: at-{host.name}}}" for host in hosts)
        (folder / "links.yaml").write_text(
            f"name: links\ncluster:\n  devices:\n{devices}\n  links:\n{links}\n"
            "model:\n  name: none\n  layers:\n    - {name: layer, repeat: 8, parameters: 1 kB, output: 1 kB, "
            "activation: 1 kB, forward: 1 MFLOP}\n"
            "training: {global_batch: 8, microbatch: 1, optimizer: {name: sgd, learning_rate: 0.1}}\n"
        )
        key = folder / "key"
        for path in (key, folder / "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        self._write_client(key)

    def _write_client(self, key: Path) -> None:
        config = [
            f"Host *\n IdentityFile {key}\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR"
        ]
        config += [f"Host {name}\n HostName {device_address(rank)}" for rank, name in enumerate(self._hosts)]
        (self.folder / "ssh_config").write_text("\n".join(config) + "\n")
        for program in ("ssh", "scp"):
            script = self.folder / "bin" / program
            script.write_text(f'#!/bin/sh\nexec /usr/bin/{program} -F {self.folder}/ssh_config "$@"\n')
            script.chmod(0o755)

    def __enter__(self) -> Self:
        for host in self._hosts.values():
            group = self._group(host.name)
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(host.cores * PERIOD_US)))
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "executor.wan.linux",
                "run",
                str(os.getpid()),
                sys.executable,
                __file__,
                str(self.folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n", "the hosts did not come up"
        self._wait_for_sshd()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._hosts:
            self.kill(name)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()
        for name in self._hosts:
            self._group(name).rmdir()

    def run(self, command: str, *, timeout_s: float = 240.0) -> "subprocess.CompletedProcess[str]":
        """Do something at the desk, which the hosts can be reached from."""
        return subprocess.run(
            self._at_desk(command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=self.desk,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
        )

    def start(self, command: str) -> "subprocess.Popen[str]":
        """Begin something at the desk that goes on until it is ended."""
        return subprocess.Popen(
            self._at_desk(command),
            cwd=self.desk,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _at_desk(self, command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._process.pid}/ns/net", "bash", "-c", command]

    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, "PATH": f"{self.folder}/bin:{BIN}:{os.environ['PATH']}"}

    def kill(self, name: str) -> None:
        """Have a host lose its power: all its processes are gone at once."""
        processes = self._group(name) / "cgroup.procs"
        while numbers := processes.read_text().split():
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            time.sleep(0.02)

    def boot(self, name: str) -> None:
        """Have it come back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "up\n"
        self._wait_for_sshd()

    def _wait_for_sshd(self) -> None:
        for name in self._hosts:
            deadline_s = time.monotonic() + 20
            while self.run(f"ssh -o ConnectTimeout=2 {name} true").returncode != 0:
                assert time.monotonic() < deadline_s, f"sshd of {name} does not answer"
                time.sleep(0.2)

    def _group(self, name: str) -> Path:
        return group_of(self.folder, name)


def group_of(folder: Path, name: str) -> Path:
    """The control group of a host's processes."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return CGROUPS / f"ropebridge-{digest}-{name}"


def serve(folder: Path) -> None:
    """In the control host's network: the relay, and an sshd for each host."""
    scenario = read_scenario(folder / "links.yaml")
    names = [device.name for device in scenario.cluster.devices]
    job = JobFolder(folder / "testbed")
    job.path.mkdir()
    job.write(scenario, make_plan("megatron", scenario), RunConfig("paced", 1, "relay", adapts=True))
    create_origin(job.origin)
    Path("/run/sshd").mkdir(exist_ok=True)
    with running_relay(job):
        announce_origin(job.origin, time.monotonic())
        for rank in range(len(names)):
            start_sshd(folder, names, rank)
        print("up", flush=True)
        for name in sys.stdin:
            start_sshd(folder, names, names.index(name.strip()))
            print("up", flush=True)


def start_sshd(folder: Path, names: list[str], rank: int) -> None:
    home = folder / names[rank]
    enter = home / ".enter"
    path = f"{BIN}:{os.environ['PATH']}"
    enter.write_text(
        f"#!/bin/bash\ncd {home}\nexport HOME={home} PATH={shlex.quote(path)}\n"
        'exec bash ${SSH_ORIGINAL_COMMAND:+-c "$SSH_ORIGINAL_COMMAND"}\n'
    )
    enter.chmod(0o755)
    config = home / ".sshd_config"
    config.write_text(
        f"ListenAddress {device_address(rank)}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"Subsystem sftp /usr/lib/openssh/sftp-server\nForceCommand {enter}\nUseDNS no\n"
    )
    networks, parent = json.loads(os.environ["ROPEBRIDGE_NETWORKS"]), os.getpid()
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            die_with_parent(parent)
            (group_of(folder, names[rank]) / "cgroup.procs").write_text(str(os.getpid()))
            enter_network(networks[rank])
            os.execv(SSHD, [str(SSHD), "-D", "-e", "-f", str(config)])
        os._exit(1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
