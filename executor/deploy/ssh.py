"""Over ssh: the job's folder is copied to each host and started there; ``submit.sh`` does it, for people to read.

A host is started alone by ``submit.sh HOST``, as when it has come back. Values of secrets go over the connection's
standard input: neither files nor command lines have them.
"""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, asked, check_script
from traces.common.errors import RunError

_SCRIPT = "submit.sh"

_HEAD = """\
#!/usr/bin/env bash
# Copies the job '{name}' to its hosts and starts it there; with names of hosts, to these alone.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
options=(-o BatchMode=yes{options})

# On the host: its part of the job in a session of its own, which outlives this connection.
start() {{ # HOST ADDRESS FOLDER COMMAND
  local values state
  values="$(secrets)"
  state="$(ssh "${{options[@]}}" "$2" "mkdir -p $3 && cd $3 && if {alive}; then echo running; fi")"
  if [ "$state" = running ]; then echo "$1: runs already" >&2; return 1; fi
  scp -q -r "${{options[@]}}" "$here/job" "$2:$3/"
  printf '%s\\n' "$values" | ssh "${{options[@]}}" "$2" "cd $3 &&
    . job/environment.sh && set -a && . /dev/stdin && set +a &&
    {{ setsid nohup $4 > $1.log 2>&1 < /dev/null & echo \\$! > $1.pid; }}"
  echo "$1: started"
}}

secrets() {{
  :
{secrets}}}

wanted() {{ # HOST ASKED...
  local host="$1"; shift
  [ "$#" -eq 0 ] && return 0
  for each in "$@"; do [ "$each" = "$host" ] && return 0; done
  return 1
}}

"""


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the script."""
    text = _HEAD.format(
        name=deployment.name,
        alive=_alive("$1").replace("$(", "\\$("),
        options="".join(f" {shlex.quote(option)}" for option in deployment.ssh_options),
        secrets="".join(f"""  printf '{name}=%q\\n' "${{{name}?}}"\n""" for name in deployment.secrets),
    )
    for part in deployment.hosts.parts:
        words = (part.name, _ssh_name(deployment, part.name), _folder(deployment, part.name))
        command = deployment.command(part.name, "job")
        start = " ".join(map(shlex.quote, (*words, command)))
        text += f'if wanted {shlex.quote(part.name)} "$@"; then start {start}; fi\n'
    return {_SCRIPT: text}


def submit(deployment: Deployment, folder: Path) -> str:
    """Run the script."""
    check_script(("ssh", "scp"), deployment.secrets)
    done = subprocess.run(
        ["bash", str(folder / _SCRIPT)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RunError(f"{folder / _SCRIPT}: {said[-1]}; {done.stdout.strip() or 'no host'} until then")
    return done.stdout.strip()


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Ask each host whether its part goes on, and for the last thing that it said."""
    found = {}
    for part in deployment.hosts.parts:
        name = part.name
        script = (
            f"cd {_folder(deployment, name)} 2>/dev/null && [ -e {name}.pid ] || {{ echo 'not started'; exit; }}; "
            f"if {_alive(name)}; then echo running; else echo ended; fi; tail -n 1 {name}.log"
        )
        try:
            state, _, said = asked(_ssh(deployment, name, script), f"host {name}").strip().partition("\n")
            found[name] = f"{state}: {said}" if said else state
        except RunError as error:
            found[name] = f"out of reach ({error})"
    return found


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follows: bool) -> list[str]:
    """Return the command that shows a host's log."""
    follow = "-F " if follows else ""
    return _ssh(deployment, host, f"tail {follow}-n {lines} {_folder(deployment, host)}/{host}.log")


def stop(deployment: Deployment, folder: Path) -> str:
    """End each host's part as Ctrl-C would; what has not ended after 10 s is killed with all that it started."""
    found, missed = [], 0
    for part in deployment.hosts.parts:
        pid = f"{part.name}.pid"
        script = (
            f"cd {_folder(deployment, part.name)} 2>/dev/null && [ -e {pid} ] || {{ echo 'not started'; exit; }}; "
            f"{_alive(part.name)} || {{ echo 'had ended'; exit; }}; p=$(cat {pid}); "
            "kill -TERM $p; for i in $(seq 100); do "
            "kill -0 $p 2>/dev/null || { echo stopped; exit; }; sleep 0.1; done; "
            "kill -KILL -- -$p; echo killed"
        )
        try:
            found.append(f"{part.name}: {asked(_ssh(deployment, part.name, script), part.name).strip()}")
        except RunError as error:
            found.append(f"{part.name}: out of reach ({error})")
            missed += 1
    if missed:
        raise RunError("\n".join(["not everything could be stopped:", *found, "next: the same command again"]))
    return "\n".join(found)


def _alive(host: str) -> str:
    """A shell's question, in the job's folder, whether a host's part runs: after a boot its number may be another's."""
    return f"tr '\\0' ' ' 2>/dev/null < /proc/$(cat {host}.pid 2>/dev/null)/cmdline | grep -q 'host job {host} '"


def _ssh(deployment: Deployment, host: str, script: str) -> list[str]:
    return ["ssh", "-o", "BatchMode=yes", *deployment.ssh_options, _ssh_name(deployment, host), script]


def _ssh_name(deployment: Deployment, host: str) -> str:
    return deployment.entries[host].ssh or host


def _folder(deployment: Deployment, host: str) -> str:
    return f"{deployment.entries[host].folder}/{deployment.name}"


SSH = Target("ssh", files, submit, status, logs, stop)
