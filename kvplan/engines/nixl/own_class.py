"""NIXL's own class of agents, also where the switch has replaced it, and how its transfers are packed."""

from __future__ import annotations

import copy
import importlib
import os
from typing import Any

from kvplan.base.values import listed, quoted
from kvplan.engines.nixl.neighbours import AUTO, NEVER, WHEN
from kvplan.errors import KVPlanError, PathError

PACKED = "KVPLAN_NIXL_PACKED"
MODULE, CLASS = "nixl._api", "nixl_agent"
replaced: list[Any] = []  # the class that the switch has replaced


def agent_class() -> Any:
    """Return NIXL's own class of agents.

    Raises:
        PathError: NIXL is not installed.
    """
    try:
        module = importlib.import_module(MODULE)  # which may switch kvplan's agent on
    except ImportError as error:
        raise PathError(f"this agent needs NIXL: pip install nixl ({error})") from error
    return replaced[-1] if replaced else getattr(module, CLASS)


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
