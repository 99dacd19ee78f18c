"""SGLang's staging between prefill and decode: kvplan gathers to the ring and scatters from it.

Source: SGLang 0.5.23, ``srt/disaggregation/common/staging_buffer.py`` and ``kernels/ops/kvcache/pd_dcp_gather.py``. The
signatures, the bytes of the ring and their order are SGLang's, so that each end may run its own kernels or kvplan's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvplan.base.integers import integer
from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.sglang.head_writers import Heads, places_of, written_heads
from kvplan.engines.sglang.ring_plans import Step, checked_pages, plan_of, planes_of
from kvplan.engines.sglang.staged_pools import PoolPlanes, RowPlanes, device_of, heads_of
from kvplan.engines.slots import slot_array
from kvplan.engines.streams import current_stream
from kvplan.errors import KVPlanError, LayoutError, OverlapError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.strides import Int64Array
from kvplan.plan.row_plans import Memory, layout_of

KEPT = 32  # compiled pools; a decode rank has one for each slice of heads that a writer sends


class StagingSteps:
    """Gather and scatter of SGLang's staging, with SGLang's arguments. Any thread may call them.

    Args:
        policy: policy of the executors, one for each GPU; by default ``Policy(overlap="decode")``.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> k, v = ([torch.full((8, 4, 16), n, dtype=torch.uint8) for n in half] for half in ((1, 2), (3, 4)))
    >>> ring = torch.zeros(256, dtype=torch.uint8)
    >>> steps = StagingSteps()
    >>> steps.gather(k, v, np.array([3]), SimpleNamespace(buffer=ring), 1, 2, 2)  # page 3, heads 1 and 2
    256
    >>> ring.view(4, 64)[:, 0].tolist()
    [1, 2, 3, 4]
    >>> steps.scatter(ring, v, k, torch.tensor([0]), 2, 1, 1, 0, 2)
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: decode rank 0 has 2 heads, its pool 4; give total_kv_heads of the model
    >>> steps.close()
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or BESIDE_COMPUTE
        self._lock = threading.Lock()
        self._executors: dict[str, Executor] = {}
        self._pools: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def executor(self, device: str) -> Executor:
        """Return the executor of a device such as ``"cuda:0"``."""
        with self._lock:
            if device not in self._executors:
                self._executors[device] = Executor(device, None if device == "cpu" else self._policy)
            return self._executors[device]

    def close(self) -> None:
        """Finish all transfers and close the executors."""
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
        self._pools.clear()

    def gather(
        self,
        k_buffers: Sequence[Any],
        v_buffers: Sequence[Any],
        page_indices_np: Any,
        staging_buffer: Any,
        src_head_start: int,
        num_heads: int,
        page_size: int,
    ) -> int:
        """Gather some heads of some pages to the ring, as ``gather_all_layers_to_staging``; wait until it is done.

        Args:
            k_buffers, v_buffers: tensors by layer, see :func:`planes_of`; no V for latents.
            page_indices_np: page ids; a numpy array.
            staging_buffer: an object with the ring as ``buffer``, a uint8 tensor.
            src_head_start, num_heads: the heads.
            page_size: tokens of a page.

        Returns:
            Bytes of the ring that are written, from its first byte.

        Raises:
            LayoutError: see :func:`planes_of`; or the tensors and the ring are on two devices.
            KVPlanError: the ring is too small.
            BlockIndexError: there is no such page.
        """
        ring = staging_buffer.buffer
        pool = self._pool(k_buffers, v_buffers, ring, page_size, src_head_start, num_heads)
        pages = checked_pages(slot_array(page_indices_np, "page_indices"), pool.pages)
        nbytes = pool.page_nbytes * pages.size
        self._submit("src", [(pool, 0)], pages, ring, nbytes).synchronize()
        return nbytes

    def scatter(
        self,
        staging_buffer_view: Any,
        k_buffers: Sequence[Any],
        v_buffers: Sequence[Any],
        page_idx_tensor: Any,
        page_size: int,
        prefill_attn_tp_size: int,
        decode_attn_tp_size: int,
        dst_tp_rank: int,
        total_kv_heads: int,
    ) -> None:
        """Scatter a region of the ring, as ``scatter_staging_to_kv``; torch's current stream waits for it.

        The page ids are copied to the CPU, which waits for the current stream.

        Args:
            staging_buffer_view: the ring from the region's first byte; a uint8 tensor.
            k_buffers, v_buffers: tensors by layer, see :func:`planes_of`; no V for latents.
            page_idx_tensor: page ids; a tensor of any device.
            page_size: tokens of a page.
            prefill_attn_tp_size, decode_attn_tp_size, total_kv_heads: see :func:`written_heads`.
            dst_tp_rank: rank of decode, for messages.

        Raises:
            KVPlanError: as :meth:`scatter_heads` and :func:`written_heads`; or the pool has other heads than its rank.
        """
        parts = written_heads(prefill_attn_tp_size, decode_attn_tp_size, total_kv_heads)
        held, there = max(1, total_kv_heads // decode_attn_tp_size), heads_of(k_buffers)
        if there != held:
            raise KVPlanError(
                f"decode rank {dst_tp_rank} has {held} heads, its pool {there}; give total_kv_heads of the model"
            )
        self.scatter_heads(staging_buffer_view, k_buffers, v_buffers, page_idx_tensor, page_size, parts)

    def scatter_heads(
        self,
        staging_buffer_view: Any,
        k_buffers: Sequence[Any],
        v_buffers: Sequence[Any],
        page_idx_tensor: Any,
        page_size: int,
        parts: Sequence[Heads],
    ) -> None:
        """Scatter a region of the ring that holds any parts of the heads, one after another.

        The numbers of ranks need not divide each other, and the pages of the side that gathered may have other sizes.

        Args:
            staging_buffer_view, k_buffers, v_buffers, page_idx_tensor, page_size: as in :meth:`scatter`.
            parts: the heads of each part, in the order of the ring, such as :func:`shared_heads` returns. Of equal
                parts, one is scattered.

        Raises:
            LayoutError, KVPlanError, BlockIndexError: as in :meth:`gather`.
            OverlapError: a page is given twice, or two parts share some of their heads.
        """
        ring, whole = staging_buffer_view, sum(part.many for part in parts)
        places = [
            (self._pool(k_buffers, v_buffers, ring, page_size, *heads), before) for heads, before in places_of(parts)
        ]
        if not places:
            return
        pages = checked_pages(slot_array(page_idx_tensor, "page_indices"), places[0][0].pages)
        if np.unique(pages).size < pages.size:
            raise OverlapError("a page is given twice; each page of a scatter is another one")
        head = pages.size * places[0][0].page_nbytes // parts[0].many  # bytes of a head in the region
        placed = [(pool, before * head) for pool, before in places]
        transfer = self._submit("dst", placed, pages, ring, whole * head)
        transfer.wait(current_stream(device_of(ring)))

    def rows(
        self,
        kv_data_ptrs: Sequence[int],
        row_indices: Any,
        pack: Any,
        token_item_lens: Sequence[int],
        src_token_item_lens: Sequence[int] | None = None,
    ) -> None:
        """Gather rows of latents, as ``copy_mla_rows_into_pack``; torch's current stream waits for it.

        Args:
            kv_data_ptrs: address of row 0 of each plane.
            row_indices: row numbers; a tensor of any device.
            pack: the ring; a uint8 tensor.
            token_item_lens: bytes of a row that are copied, of each plane.
            src_token_item_lens: bytes from row to row, of each plane; by default the same.

        Raises:
            KVPlanError: the lists differ in length, a number is not positive, or the ring is too small.
        """
        strides = token_item_lens if src_token_item_lens is None else src_token_item_lens
        if not len(kv_data_ptrs) == len(token_item_lens) == len(strides):
            raise KVPlanError(
                f"{len(kv_data_ptrs)} addresses, {len(token_item_lens)} widths and {len(strides)} strides; give one "
                "of each for each plane"
            )
        addresses, widths, steps = (
            tuple(integer(name, one, least=1, error=KVPlanError) for one in given)
            for name, given in (("an address", kv_data_ptrs), ("a width", token_item_lens), ("a stride", strides))
        )
        rows = slot_array(row_indices, "row_indices")
        if not rows.size or not addresses:
            return
        pool = self._kept((addresses, widths, steps), lambda: RowPlanes(addresses, widths, steps, device_of(pack)))
        transfer = self._submit("src", [(pool.reaching(int(rows.max())), 0)], rows, pack, rows.size * sum(widths))
        transfer.wait(current_stream(device_of(pack)))

    def _pool(self, k: Sequence[Any], v: Sequence[Any], ring: Any, page_size: int, head: int, heads: int) -> PoolPlanes:
        """Return the compiled pool of some heads."""
        tensors = [*k, *v]
        if not tensors or device_of(tensors[0]) != device_of(ring):
            where = device_of(tensors[0]) if tensors else "none"
            raise LayoutError(f"K is on {where}, the ring on {device_of(ring)}; give tensors and a ring of one device")
        numbers = tuple(
            integer(name, one, least=least)
            for name, one, least in (("page_size", page_size, 1), ("first head", head, 0), ("num_heads", heads, 1))
        )
        held = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        key = (*numbers, len(k), *held)

        def made() -> PoolPlanes:
            layout, planes, row = planes_of(k, v, *numbers)
            return PoolPlanes(layout, planes, row * len(tensors))

        found: PoolPlanes = self._kept(key, made)
        return found

    def _kept(self, key: tuple[Any, ...], made: Callable[[], Any]) -> Any:
        with self._lock:
            found = self._pools.pop(key, None)
            self._pools[key] = found = made() if found is None else found
            while len(self._pools) > KEPT:
                self._pools.popitem(last=False)
            return found

    def _submit(
        self, step: Step, places: list[tuple[PoolPlanes, int]], pages: Int64Array, ring: Any, nbytes: int
    ) -> Transfer:
        """Submit the copies between pools and their places in the ring, after torch's current stream."""
        held = ring.numel() * ring.element_size()
        if nbytes > held:
            raise KVPlanError(f"{pages.size} pages take {nbytes:,} bytes of the ring; it has {held:,}")
        address, device = ring.data_ptr(), device_of(ring)
        with self._lock:  # run groups are made and kept
            parts = [planes.part(step, pages, address + at) for pool, at in places for planes in pool.planes]
        whole = layout_of([Memory(address, held, device, ring)])
        plan = plan_of(step, parts, places[0][0].layout, whole)
        return self.executor(device).submit(plan, after=current_stream(device))
