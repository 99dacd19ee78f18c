"""SGLang's staging between prefill and decode: kvplan gathers to the ring and scatters from it.

Source: SGLang 0.5.23, ``srt/disaggregation/common/staging_buffer.py`` and ``kernels/ops/kvcache/pd_dcp_gather.py``. The
signatures, the bytes of the ring and their order are SGLang's, so that each end may run its own kernels or kvplan's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.integers import integer
from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.sglang.head_writers import writers_of
from kvplan.engines.sglang.ring_plans import Planes, Step, checked_pages, plan_of, planes_of, planes_of_rows
from kvplan.engines.slots import slot_array
from kvplan.engines.streams import current_stream
from kvplan.errors import KVPlanError, LayoutError, OverlapError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.row_plans import Memory, layout_of

KEPT = 32  # compiled pools; a decode rank has one for each slice of heads that a writer sends


class _Pool(NamedTuple):
    """Some heads of a pool, compiled.

    Attributes:
        layout: holds all tensors.
        planes: the planes that are alike.
        page_nbytes: bytes of a page in the ring, in all planes.
    """

    layout: KVLayout
    planes: list[Planes]
    page_nbytes: int

    @property
    def pages(self) -> int:
        """Pages that all planes have."""
        return min(planes.pages for planes in self.planes)


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
            prefill_attn_tp_size, decode_attn_tp_size, dst_tp_rank, total_kv_heads: see :func:`writers_of`.

        Raises:
            LayoutError, KVPlanError, BlockIndexError: as in :meth:`gather` and :func:`writers_of`.
            OverlapError: a page is given twice.
        """
        writers, count = writers_of(prefill_attn_tp_size, decode_attn_tp_size, total_kv_heads)
        held = max(1, total_kv_heads // decode_attn_tp_size)
        pools = [
            self._pool(k_buffers, v_buffers, staging_buffer_view, page_size, head, heads) for _, head, heads in writers
        ]
        if pools[0].layout.sizes["head"] != held:
            raise KVPlanError(
                f"decode rank {dst_tp_rank} has {held} heads, its pool {pools[0].layout.sizes['head']}; give "
                "total_kv_heads of the model"
            )
        pages = checked_pages(slot_array(page_idx_tensor, "page_indices"), pools[0].pages)
        if np.unique(pages).size < pages.size:
            raise OverlapError("a page is given twice; each page of a scatter is another one")
        each = pools[0].page_nbytes * pages.size
        places = [(pool, writer.place * each) for pool, writer in zip(pools, writers, strict=True)]
        transfer = self._submit("dst", places, pages, staging_buffer_view, count * each)
        transfer.wait(current_stream(_device(staging_buffer_view)))

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
        pool = self._kept((addresses, widths, steps), lambda: _Rows(addresses, widths, steps, _device(pack)))
        transfer = self._submit("src", [(pool.reaching(int(rows.max())), 0)], rows, pack, rows.size * sum(widths))
        transfer.wait(current_stream(_device(pack)))

    def _pool(self, k: Sequence[Any], v: Sequence[Any], ring: Any, page_size: int, head: int, heads: int) -> _Pool:
        """Return the compiled pool of some heads."""
        tensors = [*k, *v]
        if not tensors or _device(tensors[0]) != _device(ring):
            where = _device(tensors[0]) if tensors else "none"
            raise LayoutError(f"K is on {where}, the ring on {_device(ring)}; give tensors and a ring of one device")
        numbers = tuple(
            integer(name, one, least=least)
            for name, one, least in (("page_size", page_size, 1), ("first head", head, 0), ("num_heads", heads, 1))
        )
        held = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        key = (*numbers, len(k), *held)

        def made() -> _Pool:
            layout, planes, row = planes_of(k, v, *numbers)
            return _Pool(layout, planes, row * len(tensors))

        found: _Pool = self._kept(key, made)
        return found

    def _kept(self, key: tuple[Any, ...], made: Callable[[], Any]) -> Any:
        with self._lock:
            found = self._pools.pop(key, None)
            self._pools[key] = found = made() if found is None else found
            while len(self._pools) > KEPT:
                self._pools.popitem(last=False)
            return found

    def _submit(
        self, step: Step, places: list[tuple[_Pool, int]], pages: Int64Array, ring: Any, nbytes: int
    ) -> Transfer:
        """Submit the copies between pools and their places in the ring, after torch's current stream."""
        held = ring.numel() * ring.element_size()
        if nbytes > held:
            raise KVPlanError(f"{pages.size} pages take {nbytes:,} bytes of the ring; it has {held:,}")
        address, device = ring.data_ptr(), _device(ring)
        with self._lock:  # run groups are made and kept
            parts = [planes.part(step, pages, address + at) for pool, at in places for planes in pool.planes]
        whole = layout_of([Memory(address, held, device, ring)])
        plan = plan_of(step, parts, places[0][0].layout, whole)
        return self.executor(device).submit(plan, after=current_stream(device))


class _Rows:
    """Planes that are given by addresses, and a layout of the rows that were seen so far."""

    def __init__(
        self, addresses: tuple[int, ...], widths: tuple[int, ...], strides: tuple[int, ...], device: str
    ) -> None:
        self._ranges = tuple(zip(addresses, widths, strides, strict=True))
        self._device, self._last = device, -1
        self._layout: KVLayout | None = None
        self._planes = planes_of_rows(addresses, widths, strides)
        self._nbytes = sum(widths)

    def reaching(self, row: int) -> _Pool:
        """Return the planes with a layout that holds rows up to this one; addresses do not tell how many there are."""
        if self._layout is None or row > self._last:
            self._last = row
            self._layout = layout_of([
                Memory(address, row * stride + width, self._device) for address, width, stride in self._ranges
            ])  # fmt: skip
        return _Pool(self._layout, self._planes, self._nbytes)


def _device(tensor: Any) -> str:
    """Return the name of a tensor's device, such as ``"cuda:0"``."""
    device = tensor.device
    return str(device) if device.index is not None or device.type == "cpu" else f"{device.type}:0"
