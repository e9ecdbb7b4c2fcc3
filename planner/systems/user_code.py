"""Functions that run Python files of the user: models, strategies and policies.

A plan never names such a file, so reading a plan runs no code.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from traces.common.errors import InputError


@contextmanager
def user_code(path: Path, failure: str, valid: str) -> Iterator[None]:
    """Redirect stdout of the user's code in the ``with`` block to stderr, and turn exceptions into `InputError`.

    Args:
        path: Path of the file with the code.
        failure: What fails, the beginning of the error message; the exception's type and first line follow.
        valid: What the user can do about the failure, for the message.

    Raises:
        InputError: The code raised an exception.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        first_line = next(iter(str(error).splitlines()), "no message")
        raise InputError(f"{failure}: {type(error).__name__}: {first_line}", where=str(path), valid=valid) from error


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
    name = f"ropebridge_user_{what}_{path.stem}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    with user_code(path, f"the {what} file fails on import", f"correct it until 'python {path.name}' runs"):
        # An import by importlib would write a `__pycache__` beside the user's file.
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
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
            valid=f"its signature is build{inspect.signature(build)}; see 'arguments' in the scenario",
        ) from None

    def built() -> Any:
        advice = f"correct the {what}, or 'arguments' in the scenario"
        with user_code(path, f"'build' fails with the arguments {dict(arguments)}", advice):
            return build(**arguments)

    return built
