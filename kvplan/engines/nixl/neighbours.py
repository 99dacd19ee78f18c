"""Peers of this machine: what this process offers them, and their memory in this process."""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Mapping, Sequence

from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.engines.nixl.handles import Neighbour
from kvplan.engines.nixl.row_plans import Memory, layout_of
from kvplan.engines.nixl.spans import Span, Spans
from kvplan.errors import LayoutError, PathError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.plan.plan import Plan

SCHEMA = "kvplan.nixl-agent/1"
Ranges = Mapping[tuple[str, int], Sequence[tuple[int, int]]]  # by kind and device: (address, bytes), disjoint

_here: weakref.WeakValueDictionary[str, Neighbourhood] = weakref.WeakValueDictionary()  # by identity


class Neighbourhood:
    """This process's end: its memory, and what it offers.

    Args:
        name: name of the agent.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = secrets.token_hex(16)
        self._spans: tuple[int, Spans] | None = None
        self._executors: dict[str, Executor] = {}
        _here[self.identity] = self

    def spans(self, ranges: Ranges, version: int) -> Spans:
        """Return this process's own registered memory; kept until it has another version."""
        if self._spans is None or self._spans[0] != version:
            self._spans = version, Spans(_spans_of(ranges))
        return self._spans[1]

    def card(self, ranges: Ranges, version: int) -> bytes:
        """Return the card for peers of this machine."""
        self.spans(ranges, version)
        return json.dumps({"schema": SCHEMA, "identity": self.identity, "version": version}).encode()

    def withdraw(self) -> None:
        """Withdraw what was offered, because some of it is deregistered."""
        self._spans = None

    def meet(self, name: str, card: bytes) -> Neighbour:
        """Open the memory of a peer.

        Raises:
            LayoutError: the card cannot be read.
            PathError: the peer is of another machine, or no transport can open its memory.
        """
        document = json_of(card)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise LayoutError(f"the card of {name!r} is {quoted(document)}; expected schema {SCHEMA!r}")
        peer = _here.get(str(document.get("identity")))
        if peer is None:
            raise PathError(f"{name!r} is of another process")
        return SameProcess(self, peer, name)

    def executor(self, device: str) -> Executor:
        """Return the executor of a device."""
        if device not in self._executors:
            self._executors[device] = Executor(device)
        return self._executors[device]


class SameProcess:
    """A peer in this process: its memory is where it is.

    Args:
        mine, its: both ends.
        name: name of the peer.
    """

    def __init__(self, mine: Neighbourhood, its: Neighbourhood, name: str) -> None:
        self.name = name
        self.words = "memory of this process"
        self._mine = mine
        self._its = weakref.ref(its)
        if its._spans is None:
            raise PathError(f"{name!r} has no memory registered")
        self.spans = its._spans[1]

    def submit(self, plan: Plan) -> Transfer:
        """See :meth:`Neighbour.submit`."""
        gpus = [layout.device for layout in plan.layouts[0] if layout.device != "cpu"]
        return self._mine.executor(gpus[0] if gpus else "cpu").submit(plan)

    def gone(self) -> str | None:
        """See :meth:`Neighbour.gone`."""
        return None if self._its() is not None else f"the agent {self.name!r} has been deleted"

    def close(self) -> None:
        """See :meth:`Neighbour.close`."""


def _spans_of(ranges: Ranges) -> list[Span]:
    devices: dict[str, list[tuple[str, int, int]]] = {}
    for (kind, number), held in ranges.items():
        device = "cpu" if kind == "DRAM" else f"cuda:{number}"
        devices.setdefault(device, []).extend((kind, address, nbytes) for address, nbytes in held)
    spans = []
    for device, held in devices.items():
        layout = layout_of([Memory(address, nbytes, device) for _, address, nbytes in held])
        spans += [Span(kind, address, nbytes, address, layout) for kind, address, nbytes in held]
    return spans
