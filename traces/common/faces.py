"""Public faces of packages: names that load the module behind them when they are first asked for (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_face(
    package: str, names: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return what a package's ``__init__`` defines as ``__all__``, ``__getattr__`` and ``__dir__``.

    Type checkers do not follow them: for these the package imports the same names under ``TYPE_CHECKING``.

    Args:
        package: The package's ``__name__``.
        names: Module to the public names that it defines. None of them may be that of a submodule of the package,
            which takes the name's place as soon as it is imported.
    """
    modules = {name: module for module, defined in names.items() for name in defined}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'; its public names: {', '.join(modules)}"
            )
        found = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return list(modules), load, lambda: list(modules)
