"""Runs the command many times in forked children of one process, which has paid for the imports, within limits.

As a program it reads requests, one JSON object a line, and answers each with one line (`Done`).
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import TracebackType
from typing import IO, Any, Never

# Processor time, and time on the clock, after which a command is ended: the clock's limit tells what waits for ever,
# also on a machine that does much else.
MOST_CPU_S = 20
MOST_WAIT_S = 90.0

# Resident memory that no command needs for wrong input, and address space beyond that of the waiting process with which
# one that asks for more than the machine has fails instead.
MOST_BYTES = 2**30
_MOST_MORE_BYTES = 3 * 2**29

_MOST_SHOWN = 20_000


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended.

    Attributes:
        status: Exit status; minus the number of the signal that ended it.
        out: Standard output.
        err: Standard error.
        peak_bytes: Most resident memory.
        cpu_s: Processor time, seconds.
        timed_out: Whether the command was ended because it went on for `MOST_WAIT_S`.
        left: Whether processes of the command outlived it.
    """

    status: int
    out: str
    err: str
    peak_bytes: int
    cpu_s: float
    timed_out: bool
    left: bool


class Forker:
    """A process that forks for each command; closed at the end of the ``with`` block."""

    def __enter__(self) -> "Forker":
        self._folder = TemporaryDirectory(prefix="ropebridge-attacks-")
        # In English, and with room for the longest lines.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", "TMPDIR": self._folder.name}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.forking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(2 * MOST_WAIT_S)
        self._process.stdout.close()
        self._folder.cleanup()

    @property
    def temporary(self) -> Path:
        """Folder for temporary files of the commands."""
        return Path(self._folder.name)

    def run(self, arguments: Sequence[str], folder: Path, most_file_bytes: int = resource.RLIM_INFINITY) -> Done:
        """Run the command in a folder, to its end, with a disk on which no file gets more than so many bytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": list(arguments), "folder": str(folder), "most_file_bytes": most_file_bytes}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        return Done(**json.loads(line))


def _serve() -> None:
    # The answers' own descriptor: nothing that a command prints can be among them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _load()
    for line in sys.stdin:
        request = json.loads(line)
        with TemporaryFile() as out, TemporaryFile() as err:
            done = _run(request["arguments"], Path(request["folder"]), request["most_file_bytes"], out, err)
        print(json.dumps(asdict(done)), file=answers, flush=True)


def _load() -> None:
    """Import what the verbs import, and load the compiled kernels."""
    import torch

    import experiments.cli.app
    import experiments.runs.scenario
    import experiments.verbs.backtest
    import experiments.verbs.hosts
    import experiments.verbs.plan
    import experiments.verbs.report
    import experiments.verbs.run
    import experiments.verbs.sweep
    import experiments.verbs.traces
    from planner.cost.device_speed import jitter_factors
    from planner.systems.registry import make_plan, make_policy
    from sim.simulator import Simulator

    scenario = experiments.runs.scenario.choose_scenario("two-regions")
    plan = make_plan("megatron", scenario)
    Simulator().run(scenario, plan, make_policy("depth", scenario), 2)
    # Loads scipy.
    jitter_factors(0, 0, 1, 0.0)
    # Threads do not survive a fork.
    torch.set_num_threads(1)


def _run(arguments: list[str], folder: Path, most_file_bytes: int, out: IO[bytes], err: IO[bytes]) -> Done:
    process = os.fork()
    if process == 0:
        _command(arguments, folder, most_file_bytes, out.fileno(), err.fileno())
    end_s, timed_out = time.monotonic() + MOST_WAIT_S, False
    while True:
        found, status, usage = os.wait4(process, os.WNOHANG)
        if found:
            break
        if time.monotonic() > end_s:
            timed_out = True
            os.killpg(process, signal.SIGKILL)
        time.sleep(0.005)
    return Done(
        os.waitstatus_to_exitcode(status),
        _text(out),
        _text(err),
        1024 * usage.ru_maxrss,
        usage.ru_utime + usage.ru_stime,
        timed_out,
        _end_group(process),
    )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_SHOWN).decode(errors="replace")


def _end_group(process: int) -> bool:
    """End the processes that a command has left; return whether there were any."""
    # A process that was told to end needs a moment.
    for pause_s in (0.0, 0.05, 0.2, 1.0, 2.0):
        time.sleep(pause_s)
        if not _members(process):
            return False
    for member in _members(process):
        os.kill(member, signal.SIGKILL)
    return True


def _members(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, of_session = stat.read_text().rpartition(") ")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _command(arguments: list[str], folder: Path, most_file_bytes: int, out: int, err: int) -> Never:
    """Run the command in this process, which ends with it as Python would."""
    status = 1
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.chdir(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MOST_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # Python would cut the compiled modules that it writes at this limit, and every later process would read them.
        sys.dont_write_bytecode = True
        # Python ignores the signal, so that writing fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_file_bytes, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["ropebridge", *arguments]
        status = _called()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _called() -> int:
    from experiments.cli.app import main

    try:
        main()
    except SystemExit as end:
        code: Any = end.code
        return code if isinstance(code, int) else int(code is not None)
    except BaseException:
        # As Python ends a process.
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
