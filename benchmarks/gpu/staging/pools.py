"""Pools as SGLang has them, of ranks with all heads and with some; and the halves of kvplan's packed transfers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

import kvplan
from kvplan.backends import sglang
from kvplan.measure.workload import fill_random
from kvplan.plan.packing.chunk_half import Slot
from kvplan.plan.packing.packing import Packing, packing_of

LAYERS = 32
WORD = 8  # bytes


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    Attributes:
        mib: MiB of each transfer.
        layers: layers of the pools.
        repeats: samples of each way.
        path: kvplan's path.
    """

    mib: tuple[float, ...]
    layers: int
    repeats: int
    path: str


class Kind(NamedTuple):
    """A kind of rows: the bytes that are contiguous in a layer's K, or V.

    Attributes:
        told: in words.
        page: tokens of a page.
        heads, sent: KV heads of the pool, and those that the other rank has.
        dim: elements of a head.
        dtype: of the pool.
    """

    told: str
    page: int
    heads: int
    sent: int
    dim: int
    dtype: torch.dtype

    @property
    def token_nbytes(self) -> int:
        """Bytes that a token sends of one layer's K, or V."""
        return self.sent * self.dim * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.token_nbytes * (self.page if self.sent == self.heads else 1)


KINDS = (
    Kind("256 B: one head of 8, bf16", 16, 8, 1, 128, torch.bfloat16),
    Kind("576 B: one token of a latent, fp8", 1, 1, 1, 576, torch.uint8),  # SGLang keeps fp8 as uint8
    Kind("8 KiB: pages of 16 tokens, 2 heads, bf16", 16, 2, 2, 128, torch.bfloat16),
    Kind("64 KiB: pages of 64 tokens, 4 heads, bf16", 64, 4, 4, 128, torch.bfloat16),
)


def settle(device: str) -> None:
    """Wait for all work of torch; an executor does not know torch's streams."""
    if device != "cpu":
        torch.cuda.synchronize(device)


class Pool:
    """K and V of all layers.

    Args:
        kind: the rows.
        heads: KV heads of this pool.
        pages: pages, and page 0, which nothing uses.
        device: of the tensors.
        layers: number of layers.
    """

    def __init__(self, kind: Kind, heads: int, pages: int, device: str, layers: int) -> None:
        self.kind, self.pages = kind, pages
        shape = ((pages + 1) * kind.page, heads, kind.dim)
        self.k, self.v = ([torch.empty(shape, dtype=kind.dtype, device=device) for _ in range(layers)] for _ in "kv")
        self.page_size = kind.page
        pool = SimpleNamespace(size=pages * kind.page, page_size=kind.page, k_buffer=self.k, v_buffer=self.v)
        self.layout = sglang.describe(pool)

    def fill(self, device: str) -> None:
        """Write random bytes everywhere."""
        for tensor in (*self.k, *self.v):
            flat = tensor.view(-1).view(torch.uint8)
            fill_random(flat[: flat.numel() // WORD * WORD].view(torch.int64), device)
        settle(device)

    def zero(self) -> None:
        """Write zeros everywhere."""
        for tensor in (*self.k, *self.v):
            tensor.zero_()
            settle(str(tensor.device))

    def rows(self, plane: int, pages: np.ndarray[Any, Any]) -> torch.Tensor:
        """The tokens of some pages, of the heads that are sent: plane counts K of all layers, then V."""
        tensor = (*self.k, *self.v)[plane][:, : self.kind.sent]
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        rows = tensor[torch.from_numpy(slots).to(tensor.device)]
        return rows.reshape(rows.shape[0], -1).view(torch.uint8)  # bits: a NaN equals nothing


class Halves:
    """A packed transfer between the pool with all heads and one with some, in both directions; one message each.

    Args:
        kind: the rows.
        nbytes: bytes of a transfer, about.
        device: ``"cuda:0"`` or ``"cpu"``.
        layers: number of layers.

    Attributes:
        all, some: the pools.
        pages: page ids of the transfer in ``all``, in random order; those of ``some`` are another order.
        nbytes: bytes of a transfer.
        ring: the memory of a message; it begins at a multiple of 256 bytes.
        gathering, scattering: the packing whose gather reads, and the one whose scatter writes, the pool ``all``.
    """

    def __init__(self, kind: Kind, nbytes: int, device: str, layers: int = LAYERS) -> None:
        self.kind, self.layers, self.device = kind, layers, device
        planes = 2 * layers
        count = max(nbytes // (planes * kind.page * kind.token_nbytes), 1)
        self.nbytes = count * planes * kind.page * kind.token_nbytes
        self.all = Pool(kind, kind.heads, count, device, layers)
        self.some = Pool(kind, kind.sent, count, device, layers)
        shuffled = np.random.default_rng(0)
        self.pages, self.others = (1 + shuffled.permutation(count) for _ in range(2))
        flat = torch.empty(self.nbytes + 256, dtype=torch.uint8, device=device)
        start = -flat.data_ptr() % 256
        self.ring = flat[start : start + self.nbytes]
        self.slot = Slot(kvplan.KVLayout.from_tensors("block dim", self.ring[None]), self.ring.data_ptr(), self.nbytes)
        self.part = self.all.layout.slice(heads=range(kind.sent)) if kind.sent < kind.heads else self.all.layout
        self.out, self.back = kvplan.compile(self.part, self.some.layout), kvplan.compile(self.some.layout, self.part)
        self.gathering, self.scattering = self.packing("gather"), self.packing("scatter")

    def packing(self, step: str) -> Packing:
        """Plan and pack the transfer whose step touches the pool ``all``."""
        plan = self.out.plan(self.pages, self.others) if step == "gather" else self.back.plan(self.others, self.pages)
        return packing_of(plan, most=self.nbytes)

    def plan(self, step: str, *, anew: bool = False) -> Any:
        """The plan of a step that touches the pool ``all``, from the page ids if ``anew``."""
        packing = self.packing(step) if anew else self.gathering if step == "gather" else self.scattering
        half = packing.gather if step == "gather" else packing.scatter
        return half(0, packing.units, self.slot)

    def verify(self, executor: kvplan.Executor) -> None:
        """Gather and scatter both ways, and compare every byte.

        Raises:
            KVPlanError: a byte differs.
        """
        self.all.fill(self.device)
        self.some.zero()
        self._move(executor, self.gathering)
        self.compare("kvplan, gather")
        self.some.fill(self.device)
        self._move(executor, self.scattering)
        self.compare("kvplan, scatter")

    def _move(self, executor: kvplan.Executor, packing: Packing) -> None:
        executor.submit(packing.gather(0, packing.units, self.slot)).synchronize()
        executor.submit(packing.scatter(0, packing.units, self.slot)).synchronize()

    def compare(self, what: str) -> None:
        """Compare the pages in both pools; see :meth:`verify`."""
        for plane in range(2 * self.layers):
            if not torch.equal(self.all.rows(plane, self.pages), self.some.rows(plane, self.others)):
                raise kvplan.KVPlanError(f"{what}: {self.kind.told}: plane {plane} differs")

    def compare_ring(self, what: str) -> None:
        """Compare the ring, in SGLang's order, with the pool ``all``; see :meth:`verify`."""
        planes = self.ring.view(2 * self.layers, -1, self.kind.token_nbytes)
        for plane, held in enumerate(planes):
            if not torch.equal(self.all.rows(plane, self.pages), held):
                raise kvplan.KVPlanError(f"{what}: {self.kind.told}: plane {plane} differs in the ring")
