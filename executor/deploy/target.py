"""What brings jobs to hosts, and what all that do so share."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.deploy.deployment import Deployment
from traces.common.errors import InputError, RunError

_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """One way to bring a job to its hosts.

    Attributes:
        name: Of it.
        files: File name to text, made from a deployment: what a person can read, and carry out without ropebridge.
        submit: Carries the files out in their folder; None where a person does.
        status: Says for each host how it stands.
        logs: Returns the command that shows what a host has printed: how many lines at the end, and whether to go on.
        stop: Ends the job on all hosts.
    """

    name: str
    files: Callable[[Deployment], Mapping[str, str]]
    submit: Callable[[Deployment, Path], str] | None = None
    status: Callable[[Deployment, Path], Mapping[str, str]] | None = None
    logs: Callable[[Deployment, Path, str, int, bool], list[str]] | None = None
    stop: Callable[[Deployment, Path], str] | None = None


def check_program(name: str) -> None:
    """Refuse a target whose program is not here.

    Raises:
        InputError: Names it.
    """
    if shutil.which(name) is None:
        raise InputError(
            f"there is no program '{name}' on this machine",
            where="--submit",
            valid="install it, or carry the files out where it is",
        )


def asked(command: Sequence[str], what: str) -> str:
    """Return what a program prints.

    Raises:
        RunError: It failed, or took minutes; has its last words.
    """
    check_program(command[0])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{what}: '{shlex.join(command)}' has not answered for {_PATIENCE_S:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or [f"status {done.returncode}"]
        raise RunError(f"{what}: {said[-1]}")
    return done.stdout


def exports(environment: Mapping[str, str]) -> str:
    """Return the lines of a shell script that set variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def check_script(programs: Sequence[str], secrets: Sequence[str]) -> None:
    """Refuse to run a target's script where a program or the value of a secret is missing.

    Raises:
        InputError: Names the first one.
    """
    for program in (*programs, "bash"):
        check_program(program)
    need_secrets(secrets, os.environ)


def need_secrets(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse to submit what needs secrets that are not there.

    Raises:
        InputError: Names one.
    """
    for name in names:
        if name not in environment:
            raise InputError(
                f"the variable '{name}' is not set",
                where="--submit",
                valid=f"export {name}, or drop it from 'secrets:'",
            )
