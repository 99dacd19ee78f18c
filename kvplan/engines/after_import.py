"""Call a function right after a module has been imported, by whatever program."""

from __future__ import annotations

import importlib.abc
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
    elif not any(isinstance(finder, _Finder) and finder.watch == (name, call) for finder in sys.meta_path):
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
        self.watch = name, call

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of the module, whose loader makes the call behind it."""
        if fullname != self.watch[0]:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.watch[1]()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this module's own loader
        return spec
