"""kvplan's plugin for LMCache: its connectors are kvplan's, if ``KVPLAN_LMCACHE`` is set.

Source: LMCache 0.5.6, ``v1/gpu_connector/__init__.py`` (``CreateGPUConnector``), which its adapters for vLLM and SGLang
call. vLLM loads entry points of ``vllm.general_plugins`` in each of its processes, before it makes a connector; SGLang
loads those of ``sglang.srt.plugins``.
"""

from __future__ import annotations

import logging
import sys
from functools import partial, wraps
from typing import Any

from kvplan.cost.policy import Policy
from kvplan.engines.after_import import after_import, show_lines
from kvplan.engines.asked_policy import asked_policy
from kvplan.engines.lmcache import connector_for, described

VARIABLE = "KVPLAN_LMCACHE"
MODULE, MAKER = "lmcache.v1.gpu_connector", "CreateGPUConnector"
ENGINES = ("VLLM", "SGLANG")
log = logging.getLogger("kvplan.engines.lmcache")


def plugin() -> None:
    """Let kvplan move the tokens of each LMCache engine, if ``KVPLAN_LMCACHE`` is set. vLLM and SGLang call this.

    With ``KVPLAN_LMCACHE=auto``, the cost model chooses the path; the name of a path selects that path. ``0`` or an
    empty value leaves LMCache unchanged.

    Raises:
        KVPlanError: ``KVPLAN_LMCACHE`` has another value.
    """
    policy = asked_policy(VARIABLE)
    if policy is None:
        return
    show_lines(log)
    install(policy)


def install(policy: Policy | None = None) -> None:
    """Let kvplan move the tokens of each LMCache engine that is made in this process from now on.

    Args:
        policy: policy of the executors; by default ``Policy(overlap="decode")``.
    """
    after_import(MODULE, lambda: _replace(policy))


def _replace(policy: Policy | None) -> None:
    module = sys.modules[MODULE]
    own = getattr(module, MAKER)
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        """Make LMCache's connector, and put kvplan's in front of it where kvplan can serve."""
        name = getattr(engine, "name", str(engine))
        why = _refusal(config, name)
        if why:
            log.warning("LMCache moves the tokens itself: %s", why)
            return own(config, metadata, engine, layout_hints)
        on_cpu = getattr(module, "torch_device_type", "") == "cpu"
        theirs = None if on_cpu else own(config, metadata, engine, layout_hints)  # LMCache has no connector for CPUs
        log.info("kvplan moves the tokens of LMCache for %s", name)
        caches = partial(described, serving=name, metadata=metadata)
        return connector_for(theirs, metadata, caches, "cpu" if on_cpu else None, policy)

    setattr(module, MAKER, create)


def _refusal(config: Any, engine: str) -> str:
    """Return why kvplan does not serve a configuration, or ""."""
    if engine not in ENGINES:
        return f"kvplan serves LMCache in {' and '.join(ENGINES)}, and not in {engine}"
    for name in ("use_layerwise", "enable_blending"):
        if getattr(config, name, False):
            return f"with {name}, LMCache accepts only its own classes"
    return ""
