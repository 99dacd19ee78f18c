"""The entry points of kvplan's plugins for engines. Each imports its plugin only if a variable asks for it.

vLLM and SGLang load every installed plugin in each of their processes, also where nobody uses kvplan. So this module
imports almost nothing. The plugin itself reads the value of the variable, and refuses a wrong one.
"""

from __future__ import annotations

import os
from importlib import import_module


def sglang() -> None:
    """Call :func:`kvplan.engines.sglang.plugin.plugin` if ``KVPLAN_SGLANG`` is set."""
    _plug("KVPLAN_SGLANG", "sglang.plugin")


def lmcache() -> None:
    """Call :func:`kvplan.engines.lmcache.lmcache_plugin.plugin` if ``KVPLAN_LMCACHE`` is set."""
    _plug("KVPLAN_LMCACHE", "lmcache.lmcache_plugin")


def nixl() -> None:
    """Call :func:`kvplan.engines.nixl.switch.plugin` if ``KVPLAN_NIXL`` is set."""
    _plug("KVPLAN_NIXL", "nixl.switch")


def _plug(variable: str, module: str) -> None:
    if os.environ.get(variable, "") not in {"", "0"}:
        import_module(f"kvplan.engines.{module}").plugin()
