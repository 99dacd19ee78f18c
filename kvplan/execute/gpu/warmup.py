"""Warm up: compile and upload everything for which the first transfer would otherwise wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvplan.base.process import compiling
from kvplan.cuda.device import Device
from kvplan.execute.gpu.by_layer.pieces import layer_loops
from kvplan.execute.gpu.path import Path
from kvplan.plan import loops
from kvplan.plan.layers import Cutting, split_layers
from kvplan.plan.plan import Plan


def warm_up(
    device: Device, plan: Plan | None, likely: Callable[[Plan], Sequence[Path]], cuts: Sequence[Cutting] = ()
) -> None:
    """Load compiled loops, kernels and run tables of every path that plans of these programs may take; move nothing.

    Args:
        device: the GPU.
        plan: one of the plans; if None, only the loops are loaded.
        likely: returns the paths that a plan may take.
        cuts: groups of layers that transfers are cut into; empty if they are not cut.

    Raises:
        KVPlanError: a submit of the plan would raise this error.
    """
    with device.current(), compiling():  # likely() loads loops, too
        paths = [] if plan is None else likely(plan)
        loops.load()
        device.load_loops()
        if plan is None or not plan.nbytes:
            return
        if cuts:
            layer_loops().load()
        parts = [part for groups in cuts for _, part in split_layers(plan, groups)] or [plan]
        for part in parts:
            for path in paths:
                path.warm_up(part)
