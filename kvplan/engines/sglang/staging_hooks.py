"""Hooks that let kvplan make the steps of SGLang's staging, if ``KVPLAN_SGLANG_STAGING`` is set.

Source: SGLang 0.5.23, ``srt/disaggregation/common/staging_buffer.py``, ``kernels/ops/kvcache/pd_dcp_gather.py`` and
``srt/plugins``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from kvplan.cost.policy import Policy
from kvplan.engines import versions
from kvplan.engines.sglang.staging_steps import StagingSteps
from kvplan.errors import KVPlanError

VARIABLE = "KVPLAN_SGLANG_STAGING"
DEVICES = ("cuda", "cpu")
COUNTED_WRONGLY = 5  # dims of a pool whose last dim is not a head's


class Served(NamedTuple):
    """A function of SGLang that kvplan serves.

    Attributes:
        module, name: of the function.
        step: the method of :class:`StagingSteps`, with the same arguments.
        ring: the argument that is the ring, or holds it.
    """

    module: str
    name: str
    step: str
    ring: str

    @property
    def target(self) -> str:
        """The name by which SGLang's hooks find it."""
        return f"{self.module}.{self.name}"


_STAGING = "sglang.srt.disaggregation.common.staging_buffer"
SERVED = (
    Served(_STAGING, "gather_all_layers_to_staging", "gather", "staging_buffer"),
    Served(_STAGING, "scatter_staging_to_kv", "scatter", "staging_buffer_view"),
    Served("sglang.kernels.ops.kvcache.pd_dcp_gather", "copy_mla_rows_into_pack", "rows", "pack"),
)


def hook_staging(policy: Policy, register: Callable[[str, Callable[..., Any]], None]) -> StagingSteps:
    """Let kvplan make the gathers and scatters of SGLang's staging. Call it before SGLang applies its hooks.

    SGLang still decides which pairs are staged, allocates the ring, and writes it to the other process. Other devices
    than GPUs of CUDA and the CPU keep SGLang's kernels.

    Args:
        policy: policy of the executors.
        register: function that hooks around a function by its name; the hook gets the function and its arguments.

    Raises:
        KVPlanError: the version of SGLang is known to differ, or a function is missing or has other arguments.
    """
    versions.check(versions.SGLANG)
    for served in SERVED:
        _check(served)
    steps = StagingSteps(policy)
    for served in SERVED:
        register(served.target, _around(served, getattr(steps, served.step)))
    return steps


def _check(served: Served) -> None:
    """Raise KVPlanError if SGLang's function does not have the arguments of ours."""
    against = f"kvplan was written for SGLang {versions.SGLANG.written_for}; unset {VARIABLE}, or install that version"
    try:
        own = getattr(import_module(served.module), served.name)
    except (ImportError, AttributeError) as error:
        raise KVPlanError(f"SGLang has no {served.target} here ({error}); {against}") from None
    theirs = list(inspect.signature(own).parameters)
    ours = list(inspect.signature(getattr(StagingSteps, served.step)).parameters)[1:]
    if theirs != ours:
        raise KVPlanError(f"{served.target} takes {', '.join(theirs)}, not {', '.join(ours)}; {against}")


def _around(served: Served, step: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(step)

    def around(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        asked = signature.bind(*given, **named).arguments
        ring = asked[served.ring]
        if getattr(ring, "buffer", ring).device.type not in DEVICES:
            return own(*given, **named)
        held = asked.get("k_buffers")
        if held and len(held[0].shape) == COUNTED_WRONGLY:
            raise KVPlanError(
                "a pool in the layout vectorized_5d; SGLang counts the bytes of a message by the last dim, which is a "
                "part of a head there: run with nhd or hnd"
            )
        return step(*given, **named)

    return around
