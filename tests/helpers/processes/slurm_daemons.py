"""Debian's Slurm, with two nodes, which are both this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = ("first", "second")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")


def lacking() -> str | None:
    """Install what is missing; what cannot be, in a sentence."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started by root"
    if all(map(shutil.which, PROGRAMS)):
        return None
    if shutil.which("apt-get") is None:
        return "there is no Slurm, and no apt-get to install it"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *PACKAGES]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not all(map(shutil.which, PROGRAMS)):
        return f"Slurm cannot be installed: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
    return None


class Slurm:
    """slurmctld, slurmd and munged with files of their own, from ``with`` to its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> Mapping[str, str]:
        """That makes Slurm's commands talk to these daemons."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def __enter__(self) -> Self:
        folder = self._folder
        for name in ("state", "spool", "munge"):
            (folder / name).mkdir()
        (folder / "munge").chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = folder / "munge" / "socket"
        host, cores = socket.gethostname().split(".")[0], os.cpu_count()
        control, ports = _free_port(), {name: _free_port() for name in NODES}
        nodes = "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} State=UNKNOWN\n"
            for name, port in ports.items()
        )
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={control}\n"
            f"SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nAuthInfo=socket={munge}\nCryptoType=crypto/munge\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd-%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\nReturnToService=2\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nMpiDefault=none\nJobAcctGatherType=jobacct_gather/none\n"
            "AccountingStorageType=accounting_storage/none\nSchedulerParameters=sched_interval=1,batch_sched_delay=1\n"
            f"{nodes}"
            f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8\n"
        )
        self._start(
            *("munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={key}"),
            *(f"--{name}-file={folder}/munge/{name}" for name in ("pid", "seed", "log")),
        )
        self._await(lambda: munge.exists(), "munged")
        conf = str(folder / "slurm.conf")
        self._start("slurmctld", "-D", "-f", conf)
        for name in NODES:
            (folder / "spool" / name).mkdir()
            self._start("slurmd", "-D", "-f", conf, "-N", name)
        self._await(lambda: self._ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES), "the nodes")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._ask("scancel", "--full", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.log").open("wb") as log:
            environment = {**os.environ, **self.environment}
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def _ask(self, *command: str) -> str:
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False).stdout

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + 60
        while not holds():
            logs = "\n".join(path.read_text(errors="replace")[-800:] for path in self._folder.glob("*.log"))
            assert time.monotonic() < deadline_s, f"{what} does not come up:\n{logs}"
            time.sleep(0.3)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
