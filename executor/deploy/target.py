"""The targets of ``ropebridge deploy``, by name, and what they share: templates and calls of other programs."""

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

# Each is a module of this package with a `Target` named TARGET.
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

    Attributes:
        name: Name of the target, as in ``--target``.
        files: Returns the text of each file, by its name: readable, and usable without ropebridge.
        submit: Runs the files in their folder and returns what to print; None where a person runs them.
        logs: Returns the command that shows a host's last lines of output, and follows them if asked to.
        stop: Ends the job on all hosts and returns what to print.
    """

    name: str
    files: Callable[[Deployment], Mapping[str, str]]
    submit: Callable[[Deployment, Path], str] | None = None
    status: Callable[[Deployment, Path], Mapping[str, str]] | None = None
    logs: Callable[[Deployment, Path, str, int, bool], list[str]] | None = None
    stop: Callable[[Deployment, Path], str] | None = None


def find_target(name: str) -> Target:
    """Return the target of a name.

    Raises:
        InputError: No target has this name; lists those that there are.
    """
    if name not in TARGETS:
        raise unknown_name("target", name, TARGETS, where="--target")
    found: Target = import_module(f"executor.deploy.{name}").TARGET
    return found


def render(template: str, deployment: Deployment, **values: object) -> str:
    """Return a file of ``executor/deploy/templates`` filled in; ``deployment`` is known there under its name."""
    return _TEMPLATES.get_template(template).render(deployment=deployment, **values)


def run_program(command: Sequence[str], purpose: str) -> str:
    """Return the standard output of a program.

    Raises:
        InputError: The program is not installed.
        RunError: It failed, in which case the message has its last line of output, or it timed out.
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
    """Return the lines of a shell script that set environment variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def check_program(name: str) -> None:
    """Refuse to submit with a program that is not installed here.

    Raises:
        InputError: The program is missing.
    """
    if shutil.which(name) is None:
        raise InputError(
            f"there is no program '{name}' on this machine",
            where="--submit",
            valid="install it, or run the files on a machine that has it",
        )


def check_secrets(names: Sequence[str]) -> None:
    """Refuse to submit a job whose secrets are not in the environment.

    Raises:
        InputError: A variable is not set.
    """
    for name in names:
        if name not in os.environ:
            raise InputError(
                f"the variable '{name}' is not set",
                where="--submit",
                valid=f"export {name}, or drop it from 'secrets:'",
            )
