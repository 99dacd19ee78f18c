"""Failures of transfers in a running engine, at fixed numbers of jobs.

A job is refused, so that it moves nothing; or it is lost: its bytes arrive as garbage, and its result is an error.
Every second failure is of the other kind. A load may also bring garbage silently: tests see by it that answers show
wrong bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvplan.engines.vllm.worker import Worker
from kvplan.errors import TransferError
from kvplan.execute.executor import Executor

GARBAGE = 0x42  # as each byte of a float32: 48.6


class Lost:
    """A transfer that ends, and whose bytes are lost."""

    def __init__(self, transfer: Any, spoil: Any) -> None:
        self._transfer, self._spoil = transfer, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def _lose(self, *_: Any) -> Any:
        self._transfer.synchronize()
        self._spoil()
        raise TransferError("injected: the bytes are lost")

    result = synchronize = wait = wait_layer = _lose


class Faults:
    """Failures of every n-th load and of every n-th store; 0 means no failures.

    Args:
        loads: n of the loads.
        stores: n of the stores.
        silent: n of the loads that bring garbage without an error, if no other loads fail.

    Attributes:
        made: number of failures, by the kind of the job and of the failure.
    """

    def __init__(self, loads: int = 0, stores: int = 0, silent: int = 0) -> None:
        self.made: Counter[str] = Counter()
        self._every = {"store": stores, "load": loads or silent}
        self._silent = silent
        self._seen: Counter[str] = Counter()
        self._rows: tuple[Any, Any] = ((), ())
        self._failing: tuple[str, Any] | None = None  # while a job is submitted: how it fails, and what is spoiled

    def install(self) -> None:
        """Patch kvplan in this process."""
        made, submit = Worker.__init__, Executor.submit
        store, load, layers = Worker.submit_store, Worker.submit_load, Worker.submit_layers

        def noted(worker, groups, device_rows, host_rows, *more, **named):
            self._rows = (device_rows, host_rows)
            made(worker, groups, device_rows, host_rows, *more, **named)

        def turned(kind, call, *blocks):
            """Make a call that submits a job of these blocks."""
            self._failing = self._turn(kind, self._rows[kind == "store"], blocks)
            try:
                return call()
            finally:
                self._failing = None

        def submit_store(worker, job_id, src_spec, dst_spec):
            return turned("store", lambda: store(worker, job_id, src_spec, dst_spec), dst_spec)

        def submit_load(worker, job_id, src_spec, dst_spec, expedited=False):
            kind = "expedited load" if expedited else "load"
            return turned(kind, lambda: load(worker, job_id, src_spec, dst_spec, expedited), dst_spec)

        def submit_layers(worker, loads, whole=()):
            return turned("expedited load", lambda: layers(worker, loads, whole), *(device for _, _, device in loads))

        def submitted(executor, *given, **named):
            if self._failing is None:
                return submit(executor, *given, **named)
            how, spoil = self._failing
            if how == "refused":
                raise TransferError("injected: the transfer is refused")
            transfer = submit(executor, *given, **named)
            if how == "silent":
                transfer.synchronize()
                spoil()
                return transfer
            return Lost(transfer, spoil)

        Worker.__init__, Executor.submit = noted, submitted
        Worker.submit_store, Worker.submit_load, Worker.submit_layers = submit_store, submit_load, submit_layers

    def _turn(self, what: str, rows: Any, specs: Sequence[Any]) -> tuple[str, Any] | None:
        """Say whether the next job fails, and how."""
        kind = what.rsplit(maxsplit=1)[-1]  # expedited loads are counted with the others
        self._seen[kind] += 1
        every = self._every[kind]
        if not every or self._seen[kind] % every:
            return None
        how = "silent" if self._silent else "refused" if self._seen[kind] // every % 2 else "lost"
        self.made[f"{what} {how}"] += 1
        blocks = [int(block) for spec in specs for block in spec.block_ids]

        def spoil() -> None:
            for row in rows:
                row[blocks] = GARBAGE

        return how, spoil
