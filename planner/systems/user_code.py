"""Python files of the user with models, strategies or policies. Only the command line names them, never a plan."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.common.errors import InputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@contextmanager
def user_code(path: Path, failure: str, valid: str) -> Iterator[None]:
    """Run the user's code: its output goes to stderr, and an exception becomes an `InputError`.

    Args:
        path: Path of the file with the code.
        failure: Description of the failure if the code raises an exception.
        valid: What the user can do about it.

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


class _NoBytecodeLoader(SourceFileLoader):
    """A loader that writes no bytecode beside the user's file."""

    def set_data(self, path: str, data: "ReadableBuffer", *, _mode: int = 0o666) -> None:
        """Discard the compiled code."""


def load_function(path: Path, function: str, what: str, signature: str) -> Callable[..., Any]:
    """Return a function of a Python file. Its name in `sys.modules` cannot clash with an installed package.

    Args:
        path: Path of the file.
        function: Name of the function.
        what: Kind of file in error messages, such as ``model``.
        signature: Signature of the function in error messages.

    Raises:
        InputError: There is no such file or function, or the file fails on import.
    """
    if path.suffix != ".py":
        raise InputError("this is not a Python file", where=str(path), valid="name a file that ends in .py")
    name = f"ropebridge_user_{what}_{path.stem}"
    loader = _NoBytecodeLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None, "there is a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(path, f"the {what} file fails on import", "correct it"):
        loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"the {what} file has no function '{function}'", where=str(path), valid=f"define {signature}")
    return found  # type: ignore[no-any-return]
