"""JSON texts and the numbers in them; whatever is wrong is said with its place."""

import json
import sys
from typing import Any

from traces.common.errors import InputError
from traces.common.lines import LineError

# More nodes than this are a mistake.
MOST_NODES = 100_000


def parse_json(text: str, valid: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        InputError: It is not JSON, or not an object; ``valid`` says what would be.
    """
    document = _parse(text, valid)
    if not isinstance(document, dict):
        raise InputError("is not a JSON object", valid=valid)
    return document


def parse_json_list(text: str, valid: str) -> list[Any]:
    """Return the JSON list in a text.

    Raises:
        InputError: It is not JSON, not a list, or empty; ``valid`` says what would be valid.
    """
    document = _parse(text, valid)
    if not isinstance(document, list) or not document:
        raise InputError("is not a JSON list with something in it", valid=valid)
    return document


def checked_number(value: object, where: str) -> float:
    """Return a value as a number, finite and not negative.

    Raises:
        InputError: It is something else; ``where`` says its place.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{json.dumps(value)[:40]} is not a number", where=where, valid="a number is needed")
    if not 0 <= value <= sys.float_info.max:
        raise InputError(f"{str(value)[:40]} is out of range", where=where, valid="it must be finite and not negative")
    return float(value)


def checked_count(value: object, where: str) -> int:
    """Return a value as a number of nodes.

    Raises:
        InputError: It is something else, or more than a hundred thousand; ``where`` says its place.
    """
    number = checked_number(value, where)
    if not number.is_integer() or number > MOST_NODES:
        valid = f"a whole number of nodes, {MOST_NODES:,} at most"
        raise InputError(f"{number:g} is no count", where=where, valid=valid)
    return int(number)


def _parse(text: str, valid: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LineError(f"is not JSON: {error.msg}", line=error.lineno, valid=valid) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", valid=valid) from error
