"""How the inner functions of compiled schedulers are compiled."""

from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function")

# Numba's reference counts are kept by the callers: counting the arrays of a tuple anew at every call would take ten
# times as long as the work.
_UNCOUNTED: dict[str, Any] = {"_nrt": False}


def inner(function: Function) -> Function:
    """Compile a function that allocates no arrays and is called from compiled code only."""
    options: dict[str, Any] = {"cache": True, "forceinline": True}
    try:
        compiled: Function = njit(**options, **_UNCOUNTED)(function)
    except KeyError:  # The option has no public name: a numba without it counts.
        compiled = njit(**options)(function)
    return compiled
