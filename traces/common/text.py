"""What is set on the command line as KEY=VALUE."""

from pathlib import Path

from traces.common.errors import InputError


def read_text(path: Path, valid: str) -> str:
    """Return the text of a file.

    Args:
        path: The file.
        valid: What the file should hold, for the message.

    Raises:
        InputError: It cannot be read, is binary, or is empty; without the path, which the caller knows.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", valid="name a trace file") from error
    except ValueError as error:
        raise InputError(f"this is no path: {error}", valid="name a trace file") from error
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
    """Return both sides.

    Args:
        text: As it was given to the option.
        example: Of such a text, for who forgot the sign.
        option: Its name.

    Raises:
        InputError: There is no sign.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"'{text}' sets nothing", where=option, valid=f"write KEY=VALUE, for example '{example}'")
    return key, value
