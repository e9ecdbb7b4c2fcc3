"""Deployment over ssh: ``submit.sh`` copies the job's folder to each host and starts the host's part of the job.

``submit.sh HOST`` does so for one host only, for example after the host was restarted. Values of secrets are sent over
the standard input of ssh, so they appear neither in files nor on command lines.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, check_program, check_secrets, render, run_program
from traces.common.errors import RunError

_SCRIPT = "submit.sh"


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the script that starts the job."""
    names = [part.name for part in deployment.hosts.parts]
    hosts = [
        (name, _address(deployment, name), _folder(deployment, name), deployment.command(name, "job")) for name in names
    ]
    # The command substitution must be evaluated by the shell on the host.
    running = _running("$1").replace("$(", "\\$(")
    return {_SCRIPT: render("ssh.sh", deployment, hosts=hosts, running=running)}


def submit(deployment: Deployment, folder: Path) -> str:
    """Run the script that starts all hosts, and return its output."""
    for program in ("ssh", "scp", "bash"):
        check_program(program)
    check_secrets(deployment.secrets)
    done = subprocess.run(
        ["bash", str(folder / _SCRIPT)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        output = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RunError(f"{folder / _SCRIPT}: {output[-1]}; before that: {done.stdout.strip() or 'no host was started'}")
    return done.stdout.strip()


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Return whether each host's part runs, and the last line of its log."""
    states = {}
    for part in deployment.hosts.parts:
        name = part.name
        script = f"if {_running(name)}; then echo running; else echo ended; fi; tail -n 1 {name}.log"
        try:
            state, _, line = _run_in_folder(deployment, name, script).partition("\n")
            states[name] = f"{state}: {line}" if line else state
        except RunError as error:
            states[name] = f"out of reach ({error})"
    return states


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follow: bool) -> list[str]:
    """Return the command that shows a host's log."""
    option = "-F " if follow else ""
    return _ssh(deployment, host, f"tail {option}-n {lines} {_folder(deployment, host)}/{host}.log")


def stop(deployment: Deployment, folder: Path) -> str:
    """End each host's part by SIGTERM, after 10 s by SIGKILL; raise `RunError` if a host cannot be reached."""
    results, unreachable = [], 0
    for part in deployment.hosts.parts:
        script = (
            f"{_running(part.name)} || {{ echo 'had ended'; exit; }}; p=$(cat {part.name}.pid); "
            "kill -TERM $p; for i in $(seq 100); do "
            "kill -0 $p 2>/dev/null || { echo stopped; exit; }; sleep 0.1; done; "
            "kill -KILL -- -$p; echo killed"
        )
        try:
            results.append(f"{part.name}: {_run_in_folder(deployment, part.name, script)}")
        except RunError as error:
            results.append(f"{part.name}: out of reach ({error})")
            unreachable += 1
    if unreachable:
        raise RunError("\n".join(["some hosts could not be stopped:", *results, "next: run the same command again"]))
    return "\n".join(results)


def _running(host: str) -> str:
    """Return a shell condition that holds if the host's part runs, and its process id was not reused after a reboot."""
    return f"tr '\\0' ' ' 2>/dev/null < /proc/$(cat {host}.pid 2>/dev/null)/cmdline | grep -q 'host job {host} '"


def _run_in_folder(deployment: Deployment, host: str, script: str) -> str:
    """Run a shell script in the job's folder on a host; return its output, or 'not started' without such a folder."""
    enter = f"cd {_folder(deployment, host)} 2>/dev/null && [ -e {host}.pid ] || {{ echo 'not started'; exit; }}; "
    return run_program(_ssh(deployment, host, enter + script), f"host {host}").strip()


def _ssh(deployment: Deployment, host: str, script: str) -> list[str]:
    return ["ssh", "-o", "BatchMode=yes", *deployment.ssh_options, _address(deployment, host), script]


def _address(deployment: Deployment, host: str) -> str:
    return deployment.entries[host].ssh or host


def _folder(deployment: Deployment, host: str) -> str:
    return f"{deployment.entries[host].folder}/{deployment.name}"


TARGET = Target("ssh", files, submit, status, logs, stop)
