"""How kvplan gets into an engine's processes: entry points, the variables that ask for it, and hooks of imports.

vLLM and SGLang load every installed plugin in each of their processes, also where nobody uses kvplan. So this module
imports almost nothing. Each entry point imports its plugin only if a variable asks for it. The plugin itself reads the
value of the variable, and refuses a wrong one.
"""

from __future__ import annotations

import importlib.abc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvplan.errors import KVPlanError

if TYPE_CHECKING:
    from kvplan.cost.policy import Policy


def sglang() -> None:
    """Call :func:`kvplan.engines.sglang.hicache.plugin` if ``KVPLAN_SGLANG`` is set."""
    _plug("KVPLAN_SGLANG", "sglang.hicache")


def lmcache() -> None:
    """Call :func:`kvplan.engines.lmcache.plugin` if ``KVPLAN_LMCACHE`` is set."""
    _plug("KVPLAN_LMCACHE", "lmcache")


def nixl() -> None:
    """Call :func:`kvplan.engines.nixl.switch.plugin` if ``KVPLAN_NIXL`` is set."""
    _plug("KVPLAN_NIXL", "nixl.switch")


def _plug(variable: str, module: str) -> None:
    if os.environ.get(variable, "") not in {"", "0"}:
        import_module(f"kvplan.engines.{module}").plugin()


def asked_policy(variable: str) -> Policy | None:
    """Return the policy beside compute whose path a variable names; None if it is empty, ``0`` or not set.

    Raises:
        KVPlanError: the variable has another value than these, ``auto`` and the names of paths.

    >>> asked_policy("KVPLAN_NOT_SET") is None
    True
    """
    from kvplan.cost.policy import BESIDE_COMPUTE, PATHS  # not at the top: see there

    asked = os.environ.get(variable, "")
    if asked in {"", "0"}:
        return None
    if asked not in {"auto", *PATHS}:
        raise KVPlanError(f"{variable} is {asked!r}; give 'auto' or a path: {', '.join(PATHS)}; or '0' to do nothing")
    return replace(BESIDE_COMPUTE, path=asked)


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
