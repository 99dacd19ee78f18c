"""The switch: ``KVPLAN_NIXL=1`` puts kvplan's agent in the place of ``nixl._api.nixl_agent``.

Source: vLLM 0.33, ``vllm.plugins`` (entry points of ``vllm.general_plugins``, loaded in each of its processes before a
connector is built) and ``vllm.distributed.nixl_utils`` (which imports ``nixl._api`` at the first use, and sets an
environment variable of UCX before). SGLang 0.5.23 loads entry points of ``sglang.srt.plugins`` likewise.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kvplan.engines import versions
from kvplan.engines.nixl.interface import Agent
from kvplan.engines.nixl.own_class import CLASS, MODULE, replaced
from kvplan.errors import KVPlanError

VARIABLE = "KVPLAN_NIXL"
PACKAGE = "nixl"
log = logging.getLogger("kvplan.engines.nixl")


def plugin() -> None:
    """Replace NIXL's agent if ``KVPLAN_NIXL`` is ``1``. vLLM and SGLang call this in each of their processes.

    ``0`` or an empty value leaves the engine unchanged.

    Raises:
        KVPlanError: ``KVPLAN_NIXL`` has another value.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in {"", "0"}:
        return
    if asked != "1":
        raise KVPlanError(f"{VARIABLE} is {asked!r}; give '1', or '0' to do nothing")
    if not any(isinstance(handler, _Lines) for handler in log.handlers):
        log.addHandler(_Lines())
        log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    install()


def install() -> None:
    """Replace ``nixl._api.nixl_agent`` by :class:`kvplan.engines.nixl.Agent`, now or when NIXL is imported.

    It may be called several times. An engine that imported the class before keeps NIXL's own.
    """
    if PACKAGE in sys.modules:
        _replace()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _replace() -> None:
    try:
        module = sys.modules.get(MODULE) or importlib.import_module(MODULE)
        own = getattr(module, CLASS)
    except (ImportError, AttributeError) as error:
        log.warning("the package %r here is not NIXL 1.5, or cannot be used; it stays as it is: %s", PACKAGE, error)
        return
    if own is Agent:
        return
    versions.check(versions.NIXL)
    replaced.append(own)
    for held in (module, sys.modules[PACKAGE]):  # the package repeats the names of its modules
        if getattr(held, CLASS, None) is own:
            setattr(held, CLASS, Agent)
    log.info("kvplan's agent stands in front of NIXL's: it takes over transfers within this machine")


class _Lines(logging.StreamHandler[Any]):
    """Writes lines to stderr where the engine handles the lines of its own loggers only, as vLLM does."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless the program handles all lines by itself."""
        if not logging.getLogger().handlers:
            sys.stderr.write(f"{record.levelname} [{record.name}] {record.getMessage()}\n")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package ``nixl`` as Python does, and replaces the class when the package has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:  # fmt: skip
        """Return the spec of NIXL's package, with a loader that calls :func:`install` behind it."""
        if fullname != PACKAGE:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads a module by another loader, and then replaces the class of agents."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then replace the class."""
        self._own.exec_module(module)
        _replace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
