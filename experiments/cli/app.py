"""Defines the command `ropebridge` and the groups of its verbs.

The code of a verb is imported when the verb is called, so that `--help` is quick.
"""

import errno
import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from experiments.cli import jobs, plan, run
from experiments.cli.data import profile_app, traces_app
from experiments.cli.options import MOST, JsonOption, one_of
from experiments.runs.console import CommandInterruptedError, printable, raise_when_interrupted, say, tell
from traces.common.errors import InputError, RopebridgeError, path_of, unwritable

# Typer names only this one of its errors in words of the command.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# What is said of a path that cannot be one, wherever a verb looks at it.
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)

# What is said of a path that is not what a verb needs there, if the verb has not said it itself.
_WRONG_PATH = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)

# Number of new objects, and of collections, until the next one. By default the collector looks a hundred times at what
# a verb imports, of which nothing is garbage.
COLLECTIONS = (50_000, 10, 10)

# What Python tells by a RuntimeError, and the exit status: a path that leads to itself, no more threads.
_REFUSALS = {"Symlink loop": 2, "can't start new thread": 1}

# The groups of verbs in `--help`, in the order in which a new user needs them.
START, PLAN, RUN, DATA, MEASURE = "Start here", "Plan and simulate", "Run and deploy", "Data", "Measure"

BENCHES = (
    *("accuracy", "adaptation", "busy", "clusters", "data", "diloco", "exchanges", "executor", "faults", "fidelity"),
    *("gains", "jobs", "planner", "profile", "recovery", "regions", "regret", "report", "schedules"),
    *("simulator", "strangers", "sweep", "workers"),
)
# Packages that not every verb needs: what the verb does with it, and the extra that installs it.
EXTRAS = {
    **dict.fromkeys(("torch", "safetensors"), ("runs for real", "executor")),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), ("serves jobs", "serve")),
}
SYSTEMS = ("asteroid", "cannikin", "cloudless", "deepcee")


class VerbGroup(TyperGroup):
    """A command whose help lists the verbs under the headings of their groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        width = max(map(len, self.commands))
        limit = formatter.width - width - 6
        for title in (START, PLAN, RUN, DATA, MEASURE):
            verbs = [
                (name, each) for name, each in self.commands.items() if getattr(each, "rich_help_panel", "") == title
            ]
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), each.get_short_help_str(limit)) for name, each in verbs])


app = typer.Typer(
    name="ropebridge",
    cls=VerbGroup,
    help="Plan, simulate and run the training of one model on unlike devices in several regions.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        say(f"ropebridge {version('ropebridge')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Accept the options of the command itself, which stand before the verb."""


def bench(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"What to measure: {', '.join(BENCHES)}.", autocompletion=one_of(BENCHES)),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer cases and steps.")] = False,
    runs: Annotated[Path | None, typer.Option("--runs", help="accuracy: folder of measured runs.")] = None,
    times: Annotated[Path | None, typer.Option("--times", help="accuracy: file of the model's layer times.")] = None,
    sizes: Annotated[Path | None, typer.Option("--sizes", help="accuracy: file of the model's layer sizes.")] = None,
    network: Annotated[Path | None, typer.Option("--network", help="accuracy: file of rates between nodes.")] = None,
    model: Annotated[str, typer.Option("--model", help="accuracy: the model's name in these files.")] = "",
    refit: Annotated[
        bool, typer.Option("--refit", help="accuracy: also fit the constants to other sizes of cluster.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            help="adaptation, clusters, diloco, fidelity, regret: folder of the results, for one --seed; what it has "
            "is not repeated.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            min=1,
            max=MOST,
            help="Number of random cases, clusters, courses, trials or strangers; busy: minutes; diloco: seeds.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            max=MOST,
            help="Seed of random cases, clusters, courses and trials; another each time if absent.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure ropebridge on this machine and check fixed limits. Example: ropebridge bench fidelity --quick."""
    from experiments.verbs.bench import bench as verb

    files = (runs, times, sizes, network, model)
    _say_whether_it_holds(verb(name, quick, as_json, tell, files if any(files) else None, keep, refit, count, seed))


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(SYSTEMS)}.", autocompletion=one_of(SYSTEMS))],
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer settings and steps.")] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="Run some settings for real, and compare them with the simulator.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the result and its figure.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a published system and check its claims. Example: ropebridge reproduce asteroid --quick."""
    from experiments.verbs.bench import execute_reproduction
    from experiments.verbs.bench import reproduce as verb

    if execute:
        _say_whether_it_holds(execute_reproduction(name, quick, as_json, output, tell))
    else:
        _say_whether_it_holds(verb(name, quick, as_json, output, tell))


def _say_whether_it_holds(result: tuple[str, bool]) -> None:
    text, holds = result
    say(text)
    if not holds:
        raise typer.Exit(1)


for _title, _verbs in {
    START: (plan.demo,),
    PLAN: (plan.plan, plan.simulate, plan.compare, plan.report, plan.sweep, plan.backtest),
    RUN: (run.run, run.export, run.deploy, run.host, run.status, run.logs, run.stop, jobs.serve),
    MEASURE: (bench, reproduce),
}.items():
    for _verb in _verbs:
        app.command(rich_help_panel=_title)(_verb)
app.add_typer(jobs.jobs_app, name="jobs", rich_help_panel=RUN)
app.add_typer(traces_app, name="traces", rich_help_panel=DATA)
app.add_typer(profile_app, name="profile", rich_help_panel=DATA)


def _tell_usage(error: Any) -> None:
    """Say in one line which word of the command is wrong; a command without any word shows its help."""
    command = error.ctx.command_path if error.ctx is not None else app.info.name
    if len(sys.argv) == 1 or (error.ctx is not None and error.ctx.get_help() == error.message):
        error.show()
    else:
        tell(f"ropebridge: {printable(error.format_message().rstrip('.'))}; see '{command} --help'")


def _tell_of_system(error: OSError) -> int:
    """Say what the operating system has refused; return the exit status."""
    path = printable(path_of(error))
    reason = _reason(error)
    if error.errno in _NO_PATH:
        tell(f"ropebridge: {path}: this is no path: {reason}; check the words of the command")
    elif full := unwritable(error):
        tell(f"ropebridge: {printable(full)}")
    elif error.filename is not None:
        tell(f"ropebridge: {path} cannot be used: {reason}; check the path and its permissions")
    else:
        tell(f"ropebridge: the operating system refuses: {reason}")
    return 2 if error.errno in (*_NO_PATH, *_WRONG_PATH) else 1


def _reason(error: OSError | MemoryError) -> str:
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def main() -> None:
    """Run the command; exit with 0 on success, 1 on a failed run, 2 on wrong input."""
    raise_when_interrupted()
    gc.set_threshold(*COLLECTIONS)
    if sys.stdout is None:
        tell("ropebridge: the standard output is closed; give it a file, such as /dev/null")
        sys.exit(2)
    # A terminal without the characters of a sparkline gets question marks, not a traceback.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        # The status of `typer.Exit`; verbs return nothing.
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        _tell_usage(error)
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)
    except InputError as error:
        tell(f"ropebridge: {printable(str(error))}")
        for note in getattr(error, "__notes__", []):
            tell(note)
        sys.exit(2)
    except RopebridgeError as error:
        tell(f"ropebridge: {error}")
        for note in getattr(error, "__notes__", []):
            tell(note)
        sys.exit(1)
    except OSError as error:
        sys.exit(_tell_of_system(error))
    except UnicodeEncodeError as error:
        tell(f"ropebridge: {error.object[:100]!a} is no Unicode text; write names in UTF-8")
        sys.exit(2)
    except MemoryError as error:
        tell(f"ropebridge: the memory does not suffice: {_reason(error)}; ask for less in one command")
        sys.exit(1)
    except RuntimeError as error:
        status = next((status for start, status in _REFUSALS.items() if str(error).startswith(start)), None)
        if status is None:
            raise
        tell(f"ropebridge: {printable(str(error))}; check the {'paths' if status == 2 else 'limits'} of the command")
        sys.exit(status)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        purpose, extra = EXTRAS[error.name]
        tell(
            f"ropebridge: this verb {purpose} and needs {error.name}, which is not installed; "
            f"pip install 'ropebridge[{extra}]'"
        )
        sys.exit(2)
    except CommandInterruptedError:
        tell("ropebridge: interrupted")
        sys.exit(130)
