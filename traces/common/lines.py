"""Lines of text that hold numbers; whatever is wrong with one is said with its number."""

import math
from collections.abc import Sequence
from decimal import Decimal

from traces.common.errors import InputError


class LineError(InputError):
    """Wrong input on one line of a text.

    Args:
        problem: What is wrong, with the value that was found.
        line: Number of the line, from 1.
        valid: What would be valid.
    """

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
    """Return whether a text is meant as a number, be it a valid one (``5``) or not (``nan``)."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_scaled(text: str, power: int, *, name: str, line: int) -> float:
    """Return the number in ``text`` times ``10**power``.

    The decimal point is moved before the number becomes a float: multiplying afterwards would round twice,
    and what was written would not come back when it is read.

    Args:
        text: A decimal number.
        power: Power of ten that turns its unit into the SI unit.
        name: What the number is, for the message.
        line: Number of the line that it stands on.

    Raises:
        LineError: Not a number, not finite, or negative.
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


def check_rising(times_s: Sequence[float], lines: Sequence[int]) -> None:
    """Refuse times that do not rise from row to row.

    Args:
        times_s: Time of each row, seconds.
        lines: Number of the line that each row stands on.

    Raises:
        LineError: A time is not later than that of the row before it.
    """
    for earlier_s, later_s, line in zip(times_s, times_s[1:], lines[1:], strict=False):
        if later_s <= earlier_s:
            raise LineError(
                f"time goes from {earlier_s:.12g} s to {later_s:.12g} s",
                line=line,
                valid="times must rise from row to row",
            )
