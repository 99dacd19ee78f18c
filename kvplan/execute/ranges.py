"""NVTX ranges around submits, if the environment variable ``KVPLAN_NVTX`` is set."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvplan.errors import PathError
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.transfer import Transfer

SWITCH = "KVPLAN_NVTX"
DOMAIN = "kvplan"

Submit = Callable[..., "Transfer"]


def ranged(submit: Submit) -> Submit:
    """Wrap a submit in an NVTX range if ``KVPLAN_NVTX`` is set; otherwise return it unchanged.

    Raises:
        PathError: ``KVPLAN_NVTX`` is set, and the package nvtx is not installed.
    """
    if os.environ.get(SWITCH, "0") in ("", "0"):
        return submit
    try:
        import nvtx
    except ImportError as error:
        raise PathError(
            f"{SWITCH} is set, and NVTX ranges need the package nvtx: pip install nvtx, or unset {SWITCH}"
        ) from error
    domain = nvtx.get_domain(DOMAIN)

    def within(plan: Plan, after: Any, **told: Any) -> Transfer:
        message = f"{plan.direction} {plan.units} units, {plan.nbytes} bytes"
        domain.push_range(domain.get_event_attributes(message=message, color="green"))
        try:
            return submit(plan, after, **told)
        finally:
            domain.pop_range()

    return within
