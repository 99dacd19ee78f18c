"""Call a function right after a module has been imported, by whatever program."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call a function now if a module is loaded, and otherwise right after its first import.

    It may be called several times with the same function, which is then called once.

    Args:
        name: full name of the module.
        call: function without arguments. If it raises an error, so does the import.

    >>> import sys
    >>> noted = []
    >>> after_import("json", lambda: noted.append("json"))
    >>> noted
    ['json']
    """
    if name in sys.modules:
        call()
    elif not any(isinstance(finder, _Finder) and finder.means(name, call) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, call))


class Lines(logging.StreamHandler[Any]):
    """Writes lines to stderr where the engine handles the lines of its own loggers only, as vLLM does."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless the program handles all lines by itself."""
        if not logging.getLogger().handlers:
            sys.stderr.write(f"{record.levelname} [{record.name}] {record.getMessage()}\n")


def show_lines(log: logging.Logger) -> None:
    """Show the lines of a logger from INFO on, also in an engine that handles no lines but its own."""
    if not any(isinstance(handler, Lines) for handler in log.handlers):
        log.addHandler(Lines())
        log.setLevel(min(log.getEffectiveLevel(), logging.INFO))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and makes a call when the module has been loaded."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name, self._call = name, call

    def means(self, name: str, call: Callable[[], object]) -> bool:
        """Return whether it is for this module and this call."""
        return (self._name, self._call) == (name, call)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:  # fmt: skip
        """Return the spec of the module, with a loader that makes the call behind it."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._call)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads a module by another loader, and then makes a call."""

    def __init__(self, own: Any, call: Callable[[], object]) -> None:
        self._own, self._call = own, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then make the call."""
        self._own.exec_module(module)
        self._call()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
