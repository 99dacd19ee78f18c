"""The switch: ``KVPLAN_NIXL=1`` puts kvplan's agent in the place of ``nixl._api.nixl_agent``.

Source: vLLM 0.33, ``vllm.plugins`` (entry points of ``vllm.general_plugins``, loaded in each of its processes before a
connector is built) and ``vllm.distributed.nixl_utils`` (which imports ``nixl._api`` at the first use, and sets an
environment variable of UCX before). SGLang 0.5.23 loads entry points of ``sglang.srt.plugins`` likewise.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from kvplan.engines import versions
from kvplan.engines.nixl.interface import CLASS, MODULE, Agent, replaced
from kvplan.engines.plugins import after_import, show_lines
from kvplan.errors import KVPlanError

VARIABLE, PACKAGE = "KVPLAN_NIXL", "nixl"
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
    try:
        module = importlib.import_module(MODULE)
        own = getattr(module, CLASS)
    except (ImportError, AttributeError) as error:
        log.warning("the package %r here is not NIXL 1.5, or cannot be used; it stays as it is: %s", PACKAGE, error)
        return
    if own is Agent:
        return
    versions.check(versions.NIXL)
    replaced.append(own)
    for place in (module, sys.modules[PACKAGE]):  # the package repeats the names of its modules
        if getattr(place, CLASS, None) is own:
            setattr(place, CLASS, Agent)
    log.info("kvplan's agent stands in front of NIXL's: it takes over transfers within this machine")
