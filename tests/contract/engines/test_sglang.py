"""SGLang's host transfers through kvplan: bytes against the tensors' own indexing, and what the engine is left with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.engines import sglang as engine

torch = pytest.importorskip("torch", reason="the engine's pools are torch's")

from tests.backends.sglang import sglang_pools as pools  # noqa: E402
from tests.contract.engines.sglang_slots import LAYERS, PAGE, fill, same, slots  # noqa: E402
from tests.profiles import examples  # noqa: E402


def mha_rows(device, host, layout):
    """``(layer, kv, device page, host page, token, head)`` -> the two rows."""
    row = pools.mha_row(layout, host.kv_buffer)
    halves = device.k_buffer, device.v_buffer
    for layer in range(LAYERS):
        for kv in range(2):
            yield lambda at, to, token, head, k=layer, h=kv: (
                halves[h][k][at * PAGE + token, head], row(k, h, to, token, head)
            )  # fmt: skip


@pytest.mark.parametrize("layout", pools.MHA_LAYOUTS)
def test_pages_of_every_host_layout(layout, executor):
    """Device pages 3 and 1 become host pages 0 and 2, and come back as device pages 2 and 3."""
    device, host = fill(pools.mha_pool(), 1), fill(pools.host_mha(layout), 2)
    before = host.kv_buffer.clone()
    transfers = engine.HostTransfers(device, host, executor)
    assert (transfers.page_size, transfers.layers) == (4, (0, 1, 2))
    stored = transfers.backup(slots([0, 2]), slots([3, 1]))
    assert stored.result().nbytes == 2 * 3 * 2 * 4 * 4 * 8 * 2  # pages, layers, K and V, tokens, heads, dim, bytes
    kept = pools.mha_row(layout, before)
    now = pools.mha_row(layout, host.kv_buffer)
    for pair in mha_rows(device, host, layout):
        for at, to in ((3, 0), (1, 2)):
            assert all(same(*pair(at, to, token, head)) for token in range(PAGE) for head in range(4))
    for layer in range(LAYERS):
        for page in (1, 3):  # neighbours are as they were
            assert all(same(kept(layer, kv, page, t, 0), now(layer, kv, page, t, 0)) for kv in (0, 1) for t in range(4))
    first = device.k_buffer[2][:PAGE].clone()
    transfers.load(slots([0, 2]), slots([2, 3])).synchronize()
    for pair in mha_rows(device, host, layout):
        for at, to in ((2, 0), (3, 2)):
            assert all(same(*pair(at, to, token, head)) for token in range(PAGE) for head in range(4))
    assert same(first, device.k_buffer[2][:PAGE])  # page 0, of padding


@pytest.mark.parametrize("layout", pools.MLA_LAYOUTS)
def test_latents(layout, executor):
    device, host = fill(pools.mla_pool(start=5), 3), fill(pools.host_mla(layout, start=5), 4)
    transfers = engine.HostTransfers(device, host, executor)
    assert transfers.layers == (5, 6, 7)
    transfers.backup(slots([1]), slots([2])).synchronize()
    row = pools.mla_row(layout, host.kv_buffer)
    for layer in range(LAYERS):
        assert all(same(device.kv_buffer[layer][8 + token, 0], row(layer, 0, 1, token, 0)) for token in range(PAGE))


def test_one_layer_moves_alone(executor):
    device, host = pools.mha_pool(start=10), pools.host_mha("page_first", start=10)
    host.kv_buffer.fill_(2.5)
    transfers = engine.HostTransfers(device, host, executor)
    loading = transfers.load(slots([1]), slots([2]), 1)
    transfers.wait_layer(loading, 1)
    assert [float(buffer.sum()) for buffer in device.k_buffer] == [0.0, 2.5 * 4 * 4 * 8, 0.0]
    assert device.v_buffer[1][8:12].min() == 2.5
    assert device.v_buffer[1][:8].max() == 0
    with pytest.raises(kvplan.LayoutError, match="layer 10 is not moved"):
        transfers.wait_layer(loading, 0)
    some = transfers.load(slots([1]), slots([1]), [2, 0])
    transfers.wait_layer(some, 2)
    some.synchronize()
    assert [float(buffer[4:8].min()) for buffer in device.v_buffer] == [2.5, 0.0, 2.5]


def test_index_keys_have_a_host_pool_of_their_own(executor):
    device = fill(pools.dsa_pool(), 5)
    latents, index = pools.host_mla("page_first", page=64, dim=656, dtype=torch.uint8), pools.host_index("layer_first")
    engine.HostTransfers(device, latents, executor).backup(slots([1], 64), slots([2], 64)).synchronize()
    assert not index.index_k_with_scale_buffer.any()
    keys = engine.HostTransfers(device, index, executor)
    keys.backup(slots([3], 64), slots([1], 64)).synchronize()
    for layer in range(LAYERS):
        assert same(device.kv_buffer[layer][128:192, 0], latents.kv_buffer[64:128, layer, 0])
        assert same(device.index_k_with_scale_buffer[layer][1], index.index_k_with_scale_buffer[layer, 3])
    assert not index.index_k_with_scale_buffer[:, :3].any()


@examples(250)
@given(st.permutations(range(1, 8)), st.integers(1, 7), st.sampled_from(pools.MHA_LAYOUTS), st.integers(0, 99))
def test_what_was_stored_comes_back(executor, order, count, layout, seed):
    """Through any host layout into other pages: the bytes are those that were stored, and other pages are untouched."""
    device = fill(pools.mha_pool(size=28, layers=2), seed)
    whole = [buffer.clone() for buffer in (*device.k_buffer, *device.v_buffer)]
    transfers = engine.HostTransfers(device, pools.host_mha(layout, pages=8, layers=2), executor)
    there, back = slots(order[:count]), slots(sorted(order)[:count])
    transfers.backup(there, there).synchronize()
    for buffer in (*device.k_buffer, *device.v_buffer):
        buffer.view(torch.uint8)[PAGE:] = 0
    transfers.load(there, back).synchronize()
    for buffer, was in zip((*device.k_buffer, *device.v_buffer), whole, strict=True):
        assert same(buffer[back], was[there])
        rest = np.setdiff1d(np.arange(PAGE, 32), back.numpy())
        assert not buffer.view(torch.uint8)[rest].any()
        assert same(buffer[:PAGE], was[:PAGE])
