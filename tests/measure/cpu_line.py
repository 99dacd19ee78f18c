"""Streams and pairs of GPUs whose work has happened when the call returns, in the CPU's memory."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from kvplan.measure.flights import AtOnce
from kvplan.measure.peers import peer_baselines


class Line:
    """A stream whose copies have happened when the call returns."""

    def __init__(self, *, has_batch=True, name="cuda:0", handle=7):
        self.calls = []
        self.handle = handle
        self.name = name
        self.device = SimpleNamespace(
            driver=SimpleNamespace(cuMemcpyBatchAsync=1 if has_batch else None), ordinal=int(name[-1]),
            copy=self._copy, copy_batch=self._copy_batch, current=nullcontext, enable_peer=lambda ordinal: "",
        )  # fmt: skip
        self.stream = SimpleNamespace(synchronize=lambda: None)

    def staging(self, nbytes):
        return tuple(torch.empty(nbytes // 8, dtype=torch.int64) for _ in range(2))

    def _copy(self, dst, src, nbytes, stream):
        assert stream == self.handle
        self.calls.append(nbytes)
        ctypes.memmove(dst, src, nbytes)

    def _copy_batch(self, dst, src, size, count, stream):
        columns = [(ctypes.c_int64 * count).from_address(at) for at in (dst, src, size)]
        self.calls.append(count)
        for to, of, nbytes in zip(*columns, strict=True):
            ctypes.memmove(to, of, nbytes)


class Pair(peer_baselines.Pair):
    """A GPU and its peer on the CPU; staging memory of each is apart."""

    def enqueued(self, nbytes, issue):
        return AtOnce(nbytes, issue)

    def staging(self, line, nbytes):
        self._staging.setdefault(line.name, torch.empty(1 << 20, dtype=torch.int64))
        return self._staging[line.name][: nbytes // 8]


def on_the_cpu(monkeypatch):
    """Replace all of a GPU that baselines of pairs call; return a class of pairs."""
    monkeypatch.setattr(peer_baselines, "Line", lambda name: Line(name=name, handle=int(name[-1]) + 7))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return Pair


class Nccl:
    """A library with NCCL's entry points: a receive copies what the send of the same group sends.

    Args:
        fails: entry point that returns an error, and how often it succeeds before.
    """

    def __init__(self, fails="", spare=0):
        self.calls, self.fails, self.spare = [], fails, spare
        self.sent, self.received = {}, {}

    def __getattr__(self, call):
        if not call.startswith("nccl"):
            raise AttributeError(call)

        def called(*arguments):
            self.calls.append(call)
            if call == self.fails:
                self.spare -= 1
                if self.spare < 0:
                    return 3
            return getattr(self, f"_{call}", lambda *_: 0)(*arguments)

        return called

    def ncclGetErrorString(self, code):  # noqa: N802
        return b"internal error"

    def _ncclCommInitAll(self, handles, count, ordinals):  # noqa: N802
        for rank in range(count):
            handles[rank] = 1000 + rank
        self.ordinals = list(ordinals)
        return 0

    def _ncclSend(self, at, nbytes, kind, peer, handle, stream):  # noqa: N802
        self.sent[handle - 1000, peer] = (at, nbytes * (kind == 1), stream)
        return 0

    def _ncclRecv(self, at, nbytes, kind, peer, handle, stream):  # noqa: N802
        self.received[peer, handle - 1000] = (at, nbytes * (kind == 1), stream)
        return 0

    def _ncclGroupEnd(self):  # noqa: N802
        assert set(self.sent) == set(self.received)
        for ranks, (src, nbytes, sending) in self.sent.items():
            dst, held, receiving = self.received[ranks]
            assert nbytes == held
            assert [stream - 7 for stream in (sending, receiving)] == self.ordinals_of(ranks)
            ctypes.memmove(dst, src, nbytes)
        self.sent, self.received = {}, {}
        return 0

    def ordinals_of(self, ranks):
        return [self.ordinals[rank] for rank in ranks]
