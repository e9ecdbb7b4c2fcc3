"""Python files of the user: models, strategies, policies. They are named on the command line, never by a plan."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from traces.errors import InputError


@contextmanager
def users_code(path: Path, failure: str, valid: str) -> Iterator[None]:
    """Around code that is not ours: what it prints goes to stderr, what it raises is wrong input.

    Args:
        path: Of the code.
        failure: What has failed if it raises something.
        valid: What to do then.

    Raises:
        InputError: With ``failure``, and what was raised.
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
    """Return a function of a Python file; the file's name in sys.modules cannot clash with anything installed.

    Args:
        path: Of the file.
        function: Name of it.
        what: The file is for, such as ``model``.
        signature: How the function must look, for who has none.

    Raises:
        InputError: There is no such file or function, or the file fails on import.
    """
    name = f"ropebridge_user_{what}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("this is not a Python file", where=str(path), valid="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with users_code(path, f"the {what} file fails on import", "correct it"):
        spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"the {what} file has no function '{function}'", where=str(path), valid=f"define {signature}")
    return found  # type: ignore[no-any-return]
