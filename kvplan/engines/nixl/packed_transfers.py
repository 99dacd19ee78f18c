"""The memory of peers whose transfers are packed, and such a transfer as its handle sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from kvplan.agents.packed.packed_transfer import PackedTransfer
from kvplan.agents.packed.programs import far_memory
from kvplan.base.threads import Call
from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.engines.nixl.spans import Placed
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout

GREET_SECONDS = 5.0  # that a transfer waits for a peer's first answer; then NIXL moves it
RELEASE_SECONDS = 10.0  # that a transfer which is given up waits for the copies that run here


class FarMemory:
    """The memory of a peer by its own addresses: NIXL has checked that rows lie in it, and the peer checks them again.

    >>> import numpy as np
    >>> rows = Rows.of(np.array([[1 << 40, 64, 1]]), "VRAM")
    >>> FarMemory().place(rows).layout.device
    'cuda:1'
    """

    def __init__(self) -> None:
        self._layouts: dict[str, KVLayout] = {}

    def place(self, rows: Rows) -> Placed | None:
        """Return rows with a layout of the peer's device; None if they are on several devices."""
        number = int(rows.device[0])
        if rows.kind == "VRAM" and bool((rows.device != number).any()):
            return None
        device = "cpu" if rows.kind == "DRAM" else f"cuda:{number}"
        if device not in self._layouts:
            self._layouts[device] = far_memory(device)
        return Placed(rows, self._layouts[device])


class FarTransfer(Transfer):
    """A packed transfer that ends if its peer does not answer at all.

    Args:
        inner: the packed transfer.
        greeted: returns whether the peer has answered.
        silent: called if it has not, in time.
        give_up: ends the transfer.

    Attributes:
        plan: the plan that it moves.
    """

    def __init__(
        self, inner: PackedTransfer, greeted: Callable[[], bool], silent: Callable[[], object],
        give_up: Callable[[PackedTransfer, str], object],
    ) -> None:  # fmt: skip
        self.plan = inner.plan
        self._inner, self._greeted, self._silent, self._give_up = inner, greeted, silent, give_up
        self._until = time.monotonic() + GREET_SECONDS

    @property
    def begun(self) -> bool:
        """Whether the destination may have been changed."""
        return self._inner.begun

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`kvplan.Transfer.layer_groups`."""
        return self._inner.layer_groups

    def done(self) -> bool:
        """Return whether it has ended."""
        if not self._inner.done() and time.monotonic() > self._until and not self._greeted() and self._inner.cancel():
            self._silent()
        return self._inner.done()

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended, or raise TransferError."""
        self._inner.synchronize(timeout)

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`."""
        return self._inner.add_done_callback(function)

    def cancel(self) -> bool:
        """Give it up. This waits for the copies that run here, and not for the peer.

        Returns:
            Whether nothing of it reads or writes the memory of this process any more.
        """
        if not self._inner.cancel():
            self._give_up(self._inner, "it was released")
        with suppress(TransferError):
            self._inner.synchronize(RELEASE_SECONDS)
        return self._inner.over
