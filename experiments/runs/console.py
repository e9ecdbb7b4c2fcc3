"""What the command says: results on the standard output, everything else on the other one."""

import os
import sys

from traces.common.errors import RunError


def say(text: str) -> None:
    """Print results.

    Raises:
        RunError: They cannot be written, to a full disk for example; a reader that has left, typer deals with.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # Else the interpreter would try again when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError(f"the results cannot be written to the standard output: {error.strerror}") from error


def tell(line: str) -> None:
    """Print a line about the progress, or about what went wrong."""
    print(line, file=sys.stderr, flush=True)
