"""NIXL itself: a descriptor for each row, flat or strided, read or written."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvplan import Plan
from kvplan.plan.descriptors import NixlList


class Posted:
    """A list of descriptors that NIXL has prepared; each call posts it and waits for its end.

    Args:
        nixl: the ``nixl_agent``.
        peer: name of the peer.
        mine, theirs: both sides.
        operation: ``"READ"`` or ``"WRITE"``.
    """

    def __init__(self, nixl: Any, peer: str, mine: NixlList, theirs: NixlList, operation: str) -> None:
        self._nixl = nixl
        self._held = [nixl.prep_xfer_dlist(*side) for side in (("NIXL_INIT_AGENT", *mine), (peer, *theirs))]
        every = np.arange(mine.descriptors, dtype=np.int32)
        self._held.insert(0, nixl.make_prepped_xfer(operation, self._held[0], every, self._held[1], every, b""))

    def __call__(self) -> float:
        """Return the seconds from the post to the end."""
        nixl, handle = self._nixl, self._held[0]
        begun = time.perf_counter()
        state = nixl.transfer(handle)
        while state == "PROC":
            state = nixl.check_xfer_state(handle)
        seconds = time.perf_counter() - begun
        if state != "DONE":
            raise RuntimeError(f"NIXL reports the state {state}")
        return seconds

    def release(self) -> None:
        """Release NIXL's handles."""
        for handle in self._held:
            handle.release()


def ways_of(nixl: Any, peer: str, load: Plan, store: Plan) -> dict[str, Posted]:
    """Return the ways to post a descriptor for each row of two plans that move the same blocks."""
    made = {}
    for operation, plan in (("READ", load), ("WRITE", store)):
        for strided in (False, True):
            src, dst = (plan.nixl(side, strided=strided) for side in ("src", "dst"))
            mine, theirs = (dst, src) if operation == "READ" else (src, dst)
            made[f"{operation} {'strided' if strided else 'flat'}"] = Posted(nixl, peer, mine, theirs, operation)
    return made
