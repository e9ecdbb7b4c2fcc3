"""The interface of targets, the ways of ``ropebridge deploy`` to bring a job to hosts, and their common functions."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from executor.deploy.deployment import Deployment
from traces.common.errors import InputError, RunError, unknown_name

# Each name is that of a module in executor/deploy, which defines its `Target` as TARGET.
TARGETS = ("torchrun", "ssh", "slurm", "kubernetes", "skypilot")

_TIMEOUT_S = 120.0

_TEMPLATES = Environment(
    loader=PackageLoader("executor.deploy"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)
_TEMPLATES.filters["quote"] = shlex.quote
_TEMPLATES.filters["json"] = json.dumps


@dataclass(frozen=True, slots=True)
class Target:
    """A way to bring a job to its hosts.

    Functions other than ``files`` get the folder of these files; they are None if the user runs the files by hand.

    Attributes:
        name: Name of the target, as in ``--target``.
        files: Returns a dictionary of file names to texts, which users can read, and run without ropebridge.
        submit: Runs the files and returns a text to print.
        status: Returns a dictionary of hosts to the states of their parts.
        logs: Returns the command that shows a host's output: host, number of last lines, whether to follow the output.
        stop: Ends the job on all hosts and returns a text to print.
    """

    name: str
    files: Callable[[Deployment], Mapping[str, str]]
    submit: Callable[[Deployment, Path], str] | None = None
    status: Callable[[Deployment, Path], Mapping[str, str]] | None = None
    logs: Callable[[Deployment, Path, str, int, bool], list[str]] | None = None
    stop: Callable[[Deployment, Path], str] | None = None


def find_target(name: str) -> Target:
    """Return the target of a name; raise `InputError` with all names if there is none."""
    if name not in TARGETS:
        raise unknown_name("target", name, TARGETS, where="--target")
    found: Target = import_module(f"executor.deploy.{name}").TARGET
    return found


def render(template: str, deployment: Deployment, **values: object) -> str:
    """Return the text of a template in ``executor/deploy/templates``, filled in with ``deployment`` and ``values``."""
    return _TEMPLATES.get_template(template).render(deployment=deployment, **values)


def run_program(command: Sequence[str], purpose: str) -> str:
    """Return the standard output of a program.

    Raises:
        InputError: The program is not installed.
        RunError: The program timed out, or failed; the message has ``purpose`` and the program's last line of output.
    """
    check_program(command[0])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{purpose}: '{shlex.join(command)}' has not ended after {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        output = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or [f"status {done.returncode}"]
        raise RunError(f"{purpose}: {output[-1]}")
    return done.stdout


def exports(environment: Mapping[str, str]) -> str:
    """Return lines of a shell script that set and export environment variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def check_program(name: str) -> None:
    """Raise `InputError` if a program that submits jobs is not installed on this machine."""
    if shutil.which(name) is None:
        raise InputError(
            f"there is no program '{name}' on this machine",
            where="--submit",
            valid="install it, or run the files on a machine that has it",
        )


def check_secrets(names: Sequence[str]) -> None:
    """Raise `InputError` if the environment lacks one of the variables with secrets."""
    for name in names:
        if name not in os.environ:
            raise InputError(
                f"the variable '{name}' is not set",
                where="--submit",
                valid=f"export {name}, or remove it from 'secrets:'",
            )
