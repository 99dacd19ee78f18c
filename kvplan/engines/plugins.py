"""The entry points of kvplan's plugins for engines. Each imports its plugin only if a variable asks for it.

vLLM and SGLang load every installed plugin in each of their processes, also where nobody uses kvplan. So this module
imports almost nothing. The plugin itself reads the value of the variable, and refuses a wrong one.
"""

from __future__ import annotations

import os


def sglang() -> None:
    """Call :func:`kvplan.engines.sglang.plugin.plugin` if ``KVPLAN_SGLANG`` is set."""
    if _asked("KVPLAN_SGLANG"):
        from kvplan.engines.sglang.plugin import plugin

        plugin()


def lmcache() -> None:
    """Call :func:`kvplan.engines.lmcache.lmcache_plugin.plugin` if ``KVPLAN_LMCACHE`` is set."""
    if _asked("KVPLAN_LMCACHE"):
        from kvplan.engines.lmcache.lmcache_plugin import plugin

        plugin()


def nixl() -> None:
    """Call :func:`kvplan.engines.nixl.switch.plugin` if ``KVPLAN_NIXL`` is set."""
    if _asked("KVPLAN_NIXL"):
        from kvplan.engines.nixl.switch import plugin

        plugin()


def _asked(variable: str) -> bool:
    """Return whether a variable has another value than ``0`` and the empty one."""
    return os.environ.get(variable, "") not in {"", "0"}
