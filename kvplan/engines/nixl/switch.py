"""NIXL's own class of agents, and the switch: ``KVPLAN_NIXL=1`` puts kvplan's in the place of ``nixl._api.nixl_agent``.

Source: vLLM 0.33, ``vllm.plugins`` (entry points of ``vllm.general_plugins``, loaded in each of its processes before a
connector is built) and ``vllm.distributed.nixl_utils`` (which imports ``nixl._api`` at the first use, and sets an
environment variable of UCX before). SGLang 0.5.23 loads entry points of ``sglang.srt.plugins`` likewise.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
from typing import Any

from kvplan.base.quoting import listed, quoted
from kvplan.engines import versions
from kvplan.engines.after_import import after_import, show_lines
from kvplan.engines.nixl.neighbours import AUTO, NEVER, WHEN
from kvplan.errors import KVPlanError, PathError

VARIABLE, PACKED = "KVPLAN_NIXL", "KVPLAN_NIXL_PACKED"
PACKAGE, MODULE, CLASS = "nixl", "nixl._api", "nixl_agent"
_replaced: list[Any] = []  # the class that the switch has replaced
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
    show_lines(log)
    install()


def install() -> None:
    """Replace ``nixl._api.nixl_agent`` by :class:`kvplan.engines.nixl.Agent`, now or when NIXL is imported.

    It may be called several times. An engine that imported the class before keeps NIXL's own.
    """
    after_import(PACKAGE, _replace)


def _replace() -> None:
    from kvplan.engines.nixl import Agent

    try:
        module = importlib.import_module(MODULE)
        own = getattr(module, CLASS)
    except (ImportError, AttributeError) as error:
        log.warning("the package %r here is not NIXL 1.5, or cannot be used; it stays as it is: %s", PACKAGE, error)
        return
    if own is Agent:
        return
    versions.check(versions.NIXL)
    _replaced.append(own)
    for place in (module, sys.modules[PACKAGE]):  # the package repeats the names of its modules
        if getattr(place, CLASS, None) is own:
            setattr(place, CLASS, Agent)
    log.info("kvplan's agent stands in front of NIXL's: it takes over transfers within this machine")


def agent_class() -> Any:
    """Return NIXL's own class of agents.

    Raises:
        PathError: NIXL is not installed.
    """
    try:
        module = importlib.import_module(MODULE)  # which may switch kvplan's agent on
    except ImportError as error:
        raise PathError(f"this agent needs NIXL: pip install nixl ({error})") from error
    return _replaced[-1] if _replaced else getattr(module, CLASS)


def own_agent(name: str, config: Any, instantiate_all: bool, when: str) -> tuple[Any, str]:
    """Make an agent of NIXL; return it, and when its transfers are packed.

    A thread of packed transfers calls it, too, so it gets a config with which NIXL locks its calls. For a config, NIXL
    ignores ``instantiate_all``.
    """
    cls, module = agent_class(), importlib.import_module(MODULE)
    modes = None if instantiate_all else getattr(module, "nixl_thread_sync_t", None)
    if when == NEVER or modes is None:
        return cls(name, config, instantiate_all), NEVER
    config = copy.copy(config) or module.nixl_agent_config()
    if config.sync_mode in (None, modes.NIXL_THREAD_SYNC_NONE):
        config.sync_mode = modes.NIXL_THREAD_SYNC_STRICT
    return cls(name, config), when


def when_packed(packed: str | None) -> str:
    """Return when transfers are packed.

    Args:
        packed: an argument of the user's, or None for what the variable ``KVPLAN_NIXL_PACKED`` says.

    Raises:
        KVPlanError: the value is unknown.

    >>> when_packed("always")
    'always'
    """
    when = (os.environ.get(PACKED) or AUTO) if packed is None else packed
    if when not in WHEN:
        raise KVPlanError(f"{PACKED if packed is None else 'packed'} is {quoted(when)}; expected one of {listed(WHEN)}")
    return when
