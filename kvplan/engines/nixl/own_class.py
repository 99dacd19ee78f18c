"""NIXL's own class of agents, which the switch may have replaced, and the options of an agent."""

from __future__ import annotations

import copy
import importlib
import logging
import os
from typing import Any

from kvplan.base.quoting import listed, quoted
from kvplan.engines.nixl.packed_peers import AUTO, NEVER, WHEN
from kvplan.errors import KVPlanError, PathError

VARIABLE = "KVPLAN_NIXL_PACKED"
MODULE, CLASS = "nixl._api", "nixl_agent"
log = logging.getLogger("kvplan.engines.nixl")
replaced: list[Any] = []  # the class that the switch has replaced


def agent_class() -> Any:
    """Return NIXL's own class of agents.

    Raises:
        PathError: NIXL is not installed.
    """
    if not replaced:
        try:
            module = importlib.import_module(MODULE)
        except ImportError as error:
            raise PathError(f"this agent needs NIXL: pip install nixl ({error})") from error
        if not replaced:  # the import may have switched kvplan's agent on
            return getattr(module, CLASS)
    return replaced[-1]


def when_packed(packed: str | None, *, own: bool) -> str:
    """Return when transfers are packed.

    Args:
        packed: an argument of the user's, or None for what the variable ``KVPLAN_NIXL_PACKED`` says.
        own: whether kvplan makes NIXL's agent. A caller's agent may refuse calls of two threads at a time, so without
            an argument nothing is packed over it.

    Raises:
        KVPlanError: the value is unknown.

    >>> when_packed("always", own=False), when_packed(None, own=False)
    ('always', 'never')
    """
    told = packed
    if packed is None:
        told = (os.environ.get(VARIABLE) or AUTO) if own else NEVER
    if told not in WHEN:
        what = VARIABLE if packed is None else "packed"
        raise KVPlanError(f"{what} is {quoted(told)}; expected one of {listed(WHEN)}")
    return str(told)


def locked_config(config: Any, *, instantiate_all: bool) -> Any:
    """Return a config with which NIXL's agent locks its calls, since a thread of packed transfers calls it, too.

    Args:
        config: the engine's config, or None.
        instantiate_all: whether the engine asks for all backends, which NIXL ignores with a config.

    Returns:
        The config; None if NIXL has no such config.
    """
    try:
        module = importlib.import_module(MODULE)
        modes = module.nixl_thread_sync_t
        if instantiate_all and config is None:
            return None
        made = module.nixl_agent_config() if config is None else copy.copy(config)
        if made.sync_mode in (None, modes.NIXL_THREAD_SYNC_NONE):
            made.sync_mode = modes.NIXL_THREAD_SYNC_STRICT
    except (ImportError, AttributeError) as error:
        log.debug("no transfer is packed: %s", error)
        return None
    return made
