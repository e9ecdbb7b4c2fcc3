"""The boundary to Python code of the user: models, data sets, strategies and policies.

What the code raises becomes an `InputError` that names the line in the user's file. `os._exit`, which would end
ropebridge without a word, becomes one too. Strategies and policies have a time limit.

A plan never names such a file, so reading a plan runs no code.
"""

import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Never, TypeVar

from traces.common.errors import InputError, InterruptError, shown
from traces.common.text import read_regular

Result = TypeVar("Result")

# Time limit in seconds for a call of a user's strategy or policy whose file does not set `limit_s`.
CALL_LIMIT_S = 15.0

# Name of the variable with which a file of the user sets another time limit.
LIMIT = "limit_s"

# Start of the names of the user's modules in `sys.modules`.
_PREFIX = "ropebridge_user_"

# Most characters of an exception's text in a message.
_MOST_CHARACTERS = 300


@contextmanager
def user_code(path: Path, failure: str, valid: str) -> Iterator[None]:
    """Redirect stdout of the user's code in the ``with`` block to stderr, and turn exceptions into `InputError`.

    Exceptions that ask the command to end, such as `KeyboardInterrupt`, stay as they are.

    Args:
        path: Path of the file with the code.
        failure: What fails, the beginning of the error message; the exception's type and first line follow.
        valid: What the user can do about the failure, for the message.

    Raises:
        InputError: The code raised an exception, or called `os._exit`; the message names the line.
    """
    try:
        with redirect_stdout(sys.stderr), without_exit():
            yield
    except (InputError, InterruptError, KeyboardInterrupt):
        raise
    except BaseException as error:
        where = raised_at(error, path) or str(path)
        raise InputError(f"{failure}: {described(error)}", where=where, valid=valid) from error


def described(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    try:
        text = next(iter(str(error).splitlines()), "")
    except BaseException:
        # The exception's class is the user's too.
        text = "its text cannot be shown"
    cut = f"{text[:_MOST_CHARACTERS]}..." if len(text) > _MOST_CHARACTERS else text
    return f"{type(error).__name__}: {cut or 'no message'}"


def raised_at(error: BaseException, path: Path | None = None) -> str | None:
    """Return ``FILE:LINE`` of the innermost line of the user's files that an exception has passed.

    It is None if the exception has passed no such line. The error of a file ``path`` that is no Python names its line.
    """
    if isinstance(error, SyntaxError) and path is not None and error.filename == str(path) and error.lineno:
        return f"{path}:{error.lineno}"
    found, trace = None, error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_PREFIX)


# --- the end of the process ---

_really_exit = os._exit
_guarded = threading.local()


class ExitCalledError(SystemExit):
    """Raised by `os._exit` in the user's code."""


def _exit(status: int) -> Never:
    # A process that the user's code has forked may end as it likes.
    if getattr(_guarded, "process", None) == os.getpid():
        raise ExitCalledError(f"os._exit({status!r}) was called, which would end ropebridge")
    _really_exit(status)


@contextmanager
def without_exit() -> Iterator[None]:
    """Return a context in which `os._exit` of this thread raises a `SystemExit`, so that the end has a cause."""
    setattr(os, "_exit", _exit)  # noqa: B010 - mypy refuses an assignment
    before, _guarded.process = getattr(_guarded, "process", None), os.getpid()
    try:
        yield
    finally:
        _guarded.process = before


# --- calls with a time limit ---


def limit_of(path: Path, what: str) -> float:
    """Return the time limit in seconds for calls of the user's file, which `load_function` has imported.

    Raises:
        InputError: The file sets ``limit_s`` to something else than a finite number above zero.
    """
    limit_s = vars(sys.modules[_module_name(path, what)]).get(LIMIT, CALL_LIMIT_S)
    if type(limit_s) not in (int, float) or not 0 < limit_s <= threading.TIMEOUT_MAX:
        valid = "give a finite number of seconds above 0"
        raise InputError(f"{LIMIT} = {shown(limit_s)} is not allowed", where=str(path), valid=valid)
    return float(limit_s)


def call_in_time(call: Callable[[], Result], limit_s: float, path: Path, what: str) -> Result:
    """Call a function of the user's code in a thread, and return its result.

    If the function takes longer than ``limit_s``, its thread gets an exception, which ends a loop in Python; a thread
    that does not end all the same ends with the process.

    Args:
        call: Calls the function.
        limit_s: Time limit in seconds.
        path: Path of the file with the function.
        what: Name of the function for messages.

    Raises:
        InputError: The function raised an exception or has not returned in time; the message names the line.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        # The exception that ends a loop may come after the loop.
        with suppress(SystemExit):
            try:
                with without_exit():
                    results.append(call())
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=run, name="user code", daemon=True)
    with user_code(path, f"{what} fails", f"correct it in {path.name}"):
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            where = _reached(thread) or str(path)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            raise InputError(
                f"{what} has not returned after {limit_s:g} s",
                where=where,
                valid=f"correct it, or set a longer limit with '{LIMIT} = SECONDS' in {path.name}",
            )
        if errors:
            raise errors[0]
        return results[0]


def _reached(thread: threading.Thread) -> str | None:
    """Return ``FILE:LINE`` of the user's file that a thread has reached; None if it is in none."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# --- files ---


def _module_name(path: Path, what: str) -> str:
    return f"{_PREFIX}{what}_{path.stem}"


def load_function(path: Path, function: str, what: str, signature: str) -> Callable[..., Any]:
    """Import a Python file and return one of its functions.

    The module's name in `sys.modules` begins with ``ropebridge_user_``, so that it hides no installed package.

    Args:
        path: Path of the file.
        function: Name of the function.
        what: Kind of file for error messages, such as ``model``.
        signature: Signature and result of the function for error messages.

    Raises:
        InputError: The file is missing, does not end in ``.py``, fails on import, or lacks the function.
    """
    if path.suffix != ".py":
        raise InputError(f"the {what} file is not a Python file", where=str(path), valid="name a file that ends in .py")
    name = _module_name(path, what)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    with user_code(path, f"the {what} file fails on import", f"correct it until 'python -P {path.name}' runs"):
        try:
            code = read_regular(path)
        except FileNotFoundError:
            raise InputError("there is no such file", where=str(path), valid="check the path") from None
        except InputError as error:
            raise error.within(str(path)) from None
        # An import by importlib would write a `__pycache__` beside the user's file.
        exec(compile(code, path, "exec"), module.__dict__)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"the {what} file has no function '{function}'", where=str(path), valid=f"define {signature}")
    return found  # type: ignore[no-any-return]


def load_build(path: Path, what: str, result: str, arguments: Mapping[str, object]) -> Callable[[], Any]:
    """Import a Python file, and return a function that calls the file's ``build`` with these keyword arguments.

    Args:
        path: Path of the file.
        what: Kind of file for error messages, such as ``model``.
        result: What ``build`` must return, for error messages.
        arguments: The keyword arguments.

    Raises:
        InputError: The file cannot be run, or has no ``build`` that takes the arguments; the returned function raises
            it if ``build`` fails.
    """
    build = load_function(path, "build", what, f"build(**arguments) that returns {result}")
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"'build' does not take these arguments: {error}",
            where=str(path),
            valid=f"its signature is build{inspect.signature(build)}; correct '--set', or 'arguments' of the scenario",
        ) from None

    def built() -> Any:
        advice = f"correct the {what}, or 'arguments' in the scenario"
        with user_code(path, f"'build' fails with the arguments {dict(arguments)}", advice):
            return build(**arguments)

    return built
