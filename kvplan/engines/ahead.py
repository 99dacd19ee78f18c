"""What an engine's first transfer would wait for, done while the engine starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvplan.errors import KVPlanError
from kvplan.execute import Executor
from kvplan.groups import Plans

logger = logging.getLogger(__name__)


def prepare(executor: Executor, programs: Iterable[Plans]) -> None:
    """Make an executor ready for transfers by these programs, or say in the log why it is not.

    What an executor refuses now it refuses then, too, where the engine can go on without: its start shall not fail.
    """
    try:
        for program in programs:
            executor.prepare(program.plan([0], [0]))
    except KVPlanError as error:
        logger.warning("transfers will be refused, or will wait at first: %s", error)
