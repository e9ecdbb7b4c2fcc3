"""What is set on the command line as KEY=VALUE."""

from traces.common.errors import InputError


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
