"""Drawn transfers between a device layout and a host layout of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from hypothesis import strategies as st

import kvplan
from kvplan.catalogue.layouts import NamedLayout, layout_for, named_layouts
from kvplan.catalogue.models import Group
from tests import oracle
from tests.strategies import Form, ids_of

LAYOUTS = list(named_layouts().values())


KINDS = ("mha", "mla")


DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}


def named(side: str, kind: str) -> list[NamedLayout]:
    return [layout for layout in LAYOUTS if (layout.side, layout.kind) == (side, kind)]


@dataclass(frozen=True)
class Side:
    """A layout of the catalogue, and what one rank holds in it."""

    layout: NamedLayout
    group: Group
    num_blocks: int
    block_tokens: int
    tp: int
    rank: int
    itemsize: int
    separate: bool  # whether nested tensors are allocations of their own

    @property
    def heads(self) -> range:
        """Heads of this rank; a rank of more ranks than heads has one, with others."""
        each = max(self.group.heads // self.tp, 1)
        first = self.rank * self.group.heads // self.tp
        return range(first, first + each)

    def form(self) -> Form:
        """It as plain memory: C order, no padding, whatever all ranks share laid out whole."""
        shared = "tp" in self.layout.split.values()
        heads = range(self.group.heads) if shared else self.heads
        extents = {
            "layer": len(self.group.layers), "kv": 2, "block": self.num_blocks, "token": self.block_tokens,
            "head": len(heads), "dim": self.group.dim,
        }  # fmt: skip
        nesting, dims = oracle.split_notation(self.layout.notation)
        atoms = {*nesting, *(atom for dim in dims for atom in dim)}
        sizes = {axis: extents[axis] for axis in extents if axis in {atom.partition(".")[0] for atom in atoms}}
        for factor, told in self.layout.split.items():
            axis, _, number = factor.partition(".")
            size = min(self.tp, self.group.heads) if told == "tp" else int(told)
            sizes |= {factor: size, f"{axis}.{1 - int(number)}": sizes[axis] // size}
        rank = len(dims)
        return Form(
            notation=self.layout.notation, sizes=sizes, order=tuple(range(rank)), before=(0,) * rank, after=(0,) * rank,
            shared=not self.separate, head_start=heads.start, layer_start=self.group.layers[0], itemsize=self.itemsize,
        )  # fmt: skip

    def virtual(self) -> kvplan.KVLayout:
        """It as the catalogue lays it out."""
        return layout_for(
            self.layout, self.group, num_blocks=self.num_blocks, block_tokens=self.block_tokens,
            dtype=DTYPES[self.itemsize], tp=self.tp, rank=self.rank,
        )  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    device: Side
    host: Side
    unit_tokens: int
    units: int
    device_ids: list[int]
    host_ids: list[int]
    device_skip: int
    host_skip: int
    seed: int


BLOCK_TOKENS = ((1, 1), (2, 2), (4, 2), (2, 4), (1, 3), (3, 1), (6, 4), (2, 8), (4, 1), (4, 6))  # 1 to 4 units a block


@st.composite
def transfers(draw) -> Transfer:
    kind = draw(st.sampled_from(KINDS))
    heads = draw(st.integers(1, 4)) if kind == "mha" else 1
    start, layers = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    device = draw(st.sampled_from(named("device", kind)))
    host = draw(st.sampled_from(named("host", kind)))
    whole = max(int(size) for side in (device, host) for size in (*side.split.values(), 1) if size != "tp")
    group = Group("full", kind, tuple(range(start, start + layers)), heads=heads, dim=whole * draw(st.integers(1, 3)))
    tp = draw(st.sampled_from([n for n in range(1, 5) if heads % n == 0 or n % heads == 0]))
    rank = draw(st.integers(0, tp - 1))
    itemsize = draw(st.sampled_from((1, 2, 4)))
    shares = draw(st.booleans())  # whether the host pool is of this rank, or of the whole model
    device_tokens, host_tokens = draw(st.sampled_from(BLOCK_TOKENS))
    device_blocks, host_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    src = Side(device, group, device_blocks, device_tokens, tp, rank, itemsize, draw(st.booleans()))
    dst = Side(
        host, group, host_blocks, host_tokens, tp if shares else 1, rank if shares else 0, itemsize, separate=False
    )
    unit = gcd(device_tokens, host_tokens)
    f, g = device_tokens // unit, host_tokens // unit
    device_skip, host_skip = draw(st.integers(0, f - 1)), draw(st.integers(0, g - 1))
    units = draw(st.integers(1, min(device_blocks * f - device_skip, host_blocks * g - host_skip)))
    device_ids = ids_of(draw, device_blocks, -(-(units + device_skip) // f), distinct=True)
    host_ids = ids_of(draw, host_blocks, -(-(units + host_skip) // g), distinct=True)
    # Ids say no more than this: one side's last block is used to its end.
    units = min(len(device_ids) * f - device_skip, len(host_ids) * g - host_skip)
    return Transfer(src, dst, unit, units, device_ids, host_ids, device_skip, host_skip, draw(st.integers(0, 2**31)))


def held(case: Transfer) -> range | None:
    return case.device.heads if case.device.group.kind == "mha" else None


def assert_same(cache: oracle.Cache, expected: oracle.Cache) -> None:
    for got, want in zip(cache.roots, expected.roots, strict=True):
        np.testing.assert_array_equal(got, want)
