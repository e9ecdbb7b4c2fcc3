"""Reading text: files in known formats, lines of numbers, JSON, and KEY=VALUE options. Errors name the place."""

import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, TypeVar

from traces.common.errors import InputError
from traces.common.units import size_text


class LineError(InputError):
    """Wrong input on one line of a text, whose number counts from 1."""

    def __init__(self, problem: str, *, line: int, valid: str = "") -> None:
        self.line = line
        super().__init__(problem, where=f"line {line}", valid=valid)

    def within(self, outer: str) -> InputError:
        """Return the same error placed in a file, as ``file:line``."""
        return InputError(self.problem, where=f"{outer}:{self.line}", valid=self.valid)


def first_line(text: str) -> str:
    """Return the first line that is not blank, stripped; empty if there is none."""
    return text.lstrip()[:1000].partition("\n")[0].strip()


def is_number(text: str) -> bool:
    """Return whether a text is a number, which may be infinite or ``nan``."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_scaled(text: str, power: int, *, name: str, line: int) -> float:
    """Return the number in ``text`` times ``10**power``.

    The decimal point is moved before the conversion to a float. A multiplication after the conversion would round a
    second time, so that a value could differ between writing and reading.

    Args:
        text: A decimal number.
        power: Exponent of ten that converts the text's unit to the SI unit.
        name: Name of the quantity, for the message.
        line: Number of the line, counted from 1, for the message.

    Raises:
        LineError: The text is not a number, or the number is not finite or negative.
    """
    valid = f"every {name} is a finite number, not negative"
    try:
        mantissa, marker, exponent = text.lower().partition("e")
        value = float(f"{mantissa}e{int(exponent if marker else 0) + power}")
    except ValueError as error:
        raise LineError(f"{name} {text[:40]!r} is not a number", line=line, valid=valid) from error
    if not math.isfinite(value) or value < 0:
        problem = "is negative" if value < 0 else "is too large"
        raise LineError(f"{name} {text[:40]!r} {problem}", line=line, valid=valid)
    return value


def write_scaled(value: float, power: int) -> str:
    """Return ``value`` times ``10**power`` as text that `parse_scaled` reads back to the same float."""
    scaled = value * 10.0**power
    if parse_scaled(repr(scaled), -power, name="value", line=0) == value:
        return repr(scaled)
    return str(Decimal(repr(value)).scaleb(power))


# Rows of a table beyond which its numbers would take gigabytes of memory; more than a month in steps of a second.
MOST_ROWS = 3_000_000


def check_rows(text: str) -> None:
    """Check the number of lines of a table before any is parsed.

    Raises:
        InputError: There are more than `MOST_ROWS`.
    """
    if (rows := text.count("\n")) > MOST_ROWS:
        raise InputError(f"there are {rows:,} rows", valid=f"at most {MOST_ROWS:,}: give a part, or longer steps")


def check_rising(times_s: Sequence[float], lines: Sequence[int]) -> None:
    """Check that times rise from row to row; ``lines`` are the numbers of the rows' lines.

    Raises:
        LineError: A time is not later than the time of the preceding row.
    """
    for earlier_s, later_s, line in zip(times_s, times_s[1:], lines[1:], strict=False):
        if later_s <= earlier_s:
            raise LineError(
                f"time goes from {earlier_s:.12g} s to {later_s:.12g} s",
                line=line,
                valid="times must rise from row to row",
            )


# Largest accepted number of nodes; a larger number is treated as a mistake.
MOST_NODES = 100_000


def parse_object(text: str, valid: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        InputError: The text is not JSON, or not an object; ``valid`` says what would be valid.
    """
    document = parse_json(text, valid)
    if not isinstance(document, dict):
        raise InputError("is not a JSON object", valid=valid)
    return document


def checked_number(value: object, where: str) -> float:
    """Return a value as a number, finite and not negative.

    Raises:
        InputError: The value is not such a number; ``where`` names its place in the document.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{json.dumps(value)[:40]} is not a number", where=where, valid="a number is needed")
    if not 0 <= value <= sys.float_info.max:
        raise InputError(f"{str(value)[:40]} is out of range", where=where, valid="it must be finite and not negative")
    return float(value)


def checked_count(value: object, where: str) -> int:
    """Return a value as a number of nodes.

    Raises:
        InputError: The value is not a whole number or is above `MOST_NODES`; ``where`` names its place in the document.
    """
    number = checked_number(value, where)
    if not number.is_integer() or number > MOST_NODES:
        valid = f"give a whole number of nodes, {MOST_NODES:,} at most"
        raise InputError(f"{number:g} is not a count", where=where, valid=valid)
    return int(number)


def parse_json(text: str, valid: str) -> Any:
    """Return the JSON value in a text.

    Raises:
        InputError: The text is not JSON; ``valid`` says what would be valid.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LineError(f"is not JSON: {error.msg}", line=error.lineno, valid=valid) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", valid=valid) from error


# A larger file is treated as a mistake: reading it would take gigabytes of memory, and minutes.
MOST_BYTES = 64 * 2**20


# Seconds for which a pipe may stay without a writer, and with one that writes nothing.
_PIPE_WRITER_S, _PIPE_SILENCE_S = 5.0, 15.0
_PIPE_POLL_S = 0.005


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file, or of a pipe such as a shell's ``<(command)``, but of no device or socket.

    Raises:
        InputError: The file is special or larger than ``most_bytes``, or nobody writes into the pipe. The error lacks
            the path, which the caller adds.
        OSError: The file cannot be read.
    """
    status = path.stat()
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode) or stat.S_ISSOCK(status.st_mode):
        raise InputError("is a device or socket", valid="name a regular file")
    if stat.S_ISFIFO(status.st_mode):
        content = _read_pipe(path, most_bytes + 1)
    else:
        # Otherwise reading the kernel's log in /proc would wait for its next line.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            # One byte more than is allowed: files of the system, such as those in /proc, have no size.
            content = b"" if status.st_size > most_bytes else file.read(most_bytes + 1) or b""
    if max(len(content), status.st_size) > most_bytes:
        raise InputError(f"has more than {size_text(most_bytes)}", valid="is this the right file?")
    return content


def _read_pipe(path: Path, most_bytes: int) -> bytes:
    """Return at most so many bytes from a pipe, without waiting for ever for somebody who writes."""
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    content, waited_from_s = bytearray(), time.monotonic()
    try:
        while len(content) < most_bytes:
            try:
                part = os.read(descriptor, most_bytes - len(content))
                limit_s = _PIPE_WRITER_S
                if not part and content:
                    break
            except BlockingIOError:
                part, limit_s = b"", _PIPE_SILENCE_S
            if part:
                content += part
                waited_from_s = time.monotonic()
            elif time.monotonic() > waited_from_s + limit_s:
                raise InputError("is a pipe into which nobody writes", valid="name a regular file")
            else:
                time.sleep(_PIPE_POLL_S)
    finally:
        os.close(descriptor)
    return bytes(content)


def read_text(path: Path, valid: str) -> str:
    """Return the text of a file; ``valid`` describes valid contents, for messages.

    Raises:
        InputError: The file cannot be read, is binary, or is empty. The error lacks the path, which the caller adds.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", valid="name a trace file") from error
    except ValueError as error:
        raise InputError(f"is not a path: {error}", valid="name a trace file") from error
    if b"\0" in data:
        raise InputError("is a binary file", valid=valid)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text at byte {error.start}", valid=valid) from error
    if not text.strip():
        raise InputError("is empty", valid=valid)
    return text


def key_and_value(text: str, example: str, option: str = "--set") -> tuple[str, str]:
    """Return key and value of an option given as KEY=VALUE.

    Raises:
        InputError: There is no equals sign.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"'{text}' is no assignment", where=option, valid=f"write KEY=VALUE, for example '{example}'")
    return key, value


Content = TypeVar("Content")


@dataclass(frozen=True, kw_only=True)
class Format(Generic[Content]):
    """A text file format for one type of content, such as `LinkTrace`.

    Attributes:
        looks_like: Description of a file in this format, for messages.
        matches: Returns whether a text looks like this format; a text matches at most one format.
        read: Parses a text; raises InputError if the text is invalid.
    """

    name: str
    looks_like: str
    matches: Callable[[str], bool]
    read: Callable[[str], Content]


def read_recognised(text: str, formats: Iterable[Format[Content]], kind: str, valid: str) -> Content:
    """Return the content of a text, read in the one of these formats that the text matches.

    Raises:
        InputError: The text is invalid or matches no format; ``kind`` and ``valid`` name the formats in the message.
    """
    for known in formats:
        if known.matches(text):
            return known.read(text)
    raise InputError(f"starts with '{first_line(text)[:40]}', which is no known {kind}", valid=valid)
