"""Warm-up while an engine starts, so that the first transfer does not wait for compilers."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvplan.execute.executor import Executor
from kvplan.ranks.groups import Plans

logger = logging.getLogger("kvplan.engines")


def prepare(executor: Executor, programs: Iterable[Plans] = (), *, by_layer: bool = False) -> None:
    """Warm up an executor for transfers of these programs; log a failure, because the engine must start in any case.

    A plan that is refused here is refused again at its transfer; there the engine can continue without it. If a
    compiler fails here, it is possible that no transfer needs it.
    """
    for program in (None, *programs):
        try:
            plan = None if program is None else program.plan([0], [0])
            executor.prepare(plan, by_layer=by_layer)
        except Exception as error:  # the engine starts in any case
            what = "loops" if program is None else program
            logger.warning("%r: transfers will be refused, or the first one will wait: %s: %s", what,
                           type(error).__name__, error)  # fmt: skip
