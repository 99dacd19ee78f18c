"""What an engine's first transfer would wait for, done while the engine starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvplan.execute.executor import Executor
from kvplan.ranks.groups import Plans

logger = logging.getLogger(__name__)


def prepare(executor: Executor, programs: Iterable[Plans] = (), *, by_layer: bool = False) -> None:
    """Make an executor ready for transfers by these programs, or say in the log why it is not.

    The engine starts in any case: what is refused now is refused at the transfer, too, where the engine can go on
    without; and a compiler that fails may be one that no transfer will ask for.
    """
    for program in (None, *programs):
        try:
            plan = None if program is None else program.plan([0], [0])
            executor.prepare(plan, by_layer=by_layer)
        except Exception as error:  # noqa: BLE001  # the engine starts in any case
            what = "loops" if program is None else program
            logger.warning("%r: transfers will be refused, or will wait at first: %s: %s", what,
                           type(error).__name__, error)  # fmt: skip
