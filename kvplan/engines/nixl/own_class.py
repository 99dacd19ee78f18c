"""NIXL's own class of agents, which the switch may have replaced."""

from __future__ import annotations

import copy
import importlib
import logging
from typing import Any

from kvplan.engines.nixl.packed_options import NEVER, PackedOptions
from kvplan.errors import PathError

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


def locked_config(config: Any, options: PackedOptions, *, instantiate_all: bool) -> tuple[Any, PackedOptions]:
    """Return a config with which NIXL's agent locks its calls, since a thread of packed transfers calls it, too.

    Args:
        config: the engine's config, or None.
        options: when transfers are packed.
        instantiate_all: whether the engine asks for all backends, which NIXL ignores with a config.

    Returns:
        The config for the agent, and when transfers are packed with it: never if NIXL has no such config.
    """
    if options.when == NEVER:
        return config, options
    never = options._replace(when=NEVER)
    try:
        module = importlib.import_module(MODULE)
        modes = module.nixl_thread_sync_t
        if instantiate_all and config is None:
            return config, never
        made = module.nixl_agent_config() if config is None else copy.copy(config)
        if made.sync_mode in (None, modes.NIXL_THREAD_SYNC_NONE):
            made.sync_mode = modes.NIXL_THREAD_SYNC_STRICT
    except (ImportError, AttributeError) as error:
        log.debug("no transfer is packed: %s", error)
        return config, never
    return made, options
