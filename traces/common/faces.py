"""Public names of packages, whose modules are imported on first access (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_face(
    package: str, names: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a package's ``__init__`` module.

    Type checkers do not evaluate ``__getattr__``: for them the package also imports the names under ``TYPE_CHECKING``.

    Args:
        package: The package's ``__name__``.
        names: Public names that each module defines, by the module's name. No public name may be the name of a
            submodule of the package, since the import of the submodule would replace it.
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
