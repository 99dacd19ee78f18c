"""SGLang's staging steps by kvplan: every byte of the ring and of the pools, against plain indexing by torch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplan.cost.policy import Policy
from kvplan.engines import versions
from kvplan.engines.sglang import plugin, staging_hooks
from kvplan.engines.sglang.head_writers import Heads, shared_heads, written_heads
from kvplan.engines.sglang.staging_steps import StagingSteps
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError, OverlapError

DTYPES = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64)
FORMS = ("nhd", "hnd", "vectorized_5d", "strided")


@pytest.fixture(scope="module")
def steps():
    made = StagingSteps()
    yield made
    made.close()


class Pool:
    """K and V of all layers, and their content as (plane, page, token, head, dim) bytes."""

    def __init__(self, form, *, layers=2, pages=5, page=4, heads=4, dim=16, v_dim=None, dtype=torch.uint8, seed=0):
        self.page, self.pages, self.form = page, pages, form
        self.made = torch.Generator().manual_seed(seed)
        self.k = [self.tensor(form, pages, page, heads, dim, dtype, half=0) for _ in range(layers)]
        self.v = [self.tensor(form, pages, page, heads, v_dim or dim, dtype, half=1) for _ in range(layers)]

    def tensor(self, form, pages, page, heads, dim, dtype, half):
        vectorized = (pages, heads, dim // 8, page, 8), (pages, heads, page // 2, dim, 2)
        shapes = {"nhd": (pages * page, heads, dim), "hnd": (pages, heads, page, dim),
                  "strided": (pages * page, 2, heads, dim), "vectorized_5d": vectorized[half]}  # fmt: skip
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(
            0, 256, (*shapes[form][:-1], shapes[form][-1] * size), dtype=torch.uint8, generator=self.made
        )
        whole = raw.view(dtype)
        return whole[:, 1] if form == "strided" else whole

    def content(self):
        """For each plane, (page, token, head, byte of dim)."""
        return [self.logical(tensor, half) for half, tensors in enumerate((self.k, self.v)) for tensor in tensors]

    def logical(self, tensor, half):
        if tensor.ndim == 3:
            found = tensor.reshape(self.pages, self.page, *tensor.shape[1:])
        elif tensor.ndim == 4:
            found = tensor.permute(0, 2, 1, 3)
        elif half == 0:  # page, head, dim.0, token, dim.1
            found = tensor.permute(0, 3, 1, 2, 4).flatten(3)
        else:  # page, head, token.0, dim, token.1
            found = tensor.permute(0, 2, 4, 1, 3).flatten(1, 2)
        return found.contiguous().view(torch.uint8)


def ring_of(nbytes, offset=0):
    return torch.randint(0, 256, (nbytes + offset,), dtype=torch.uint8)[offset:]


@given(
    form=st.sampled_from(FORMS), dtype=st.sampled_from(DTYPES), head=st.integers(0, 3), heads=st.integers(1, 4),
    page=st.sampled_from([2, 4, 8]), dim=st.sampled_from([8, 24, 72]), pages=st.permutations(range(6)),
    count=st.integers(0, 6), offset=st.sampled_from([0, 1, 8, 64]), layers=st.integers(1, 3),
)  # fmt: skip
def test_the_ring_holds_all_tokens_of_a_plane_then_those_of_the_next(
    steps, form, dtype, head, heads, page, dim, pages, count, offset, layers
):
    heads = min(heads, 4 - head)
    pool = Pool(form, layers=layers, pages=6, page=page, dim=dim, dtype=dtype)
    ids = np.array(pages[:count], dtype=np.int32)
    wanted = [plane[ids.astype(np.int64)][:, :, head : head + heads] for plane in pool.content()]
    flat = torch.cat([plane.reshape(-1) for plane in wanted])
    ring = ring_of(flat.numel() + 40, offset)
    rest = ring[flat.numel() :].clone()
    assert steps.gather(pool.k, pool.v, ids, SimpleNamespace(buffer=ring), head, heads, page) == flat.numel()
    assert torch.equal(ring[: flat.numel()], flat)
    assert torch.equal(ring[flat.numel() :], rest)


@given(
    ranks=st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 1), (4, 2), (2, 8), (8, 2), (8, 1), (3, 1), (16, 4)]),
    total=st.sampled_from([4, 8, 12]), form=st.sampled_from(FORMS), dtype=st.sampled_from(DTYPES),
    pages=st.permutations(range(5)), count=st.integers(1, 5), offset=st.sampled_from([0, 1, 32]),
)  # fmt: skip
def test_a_scatter_writes_the_heads_of_every_writer_and_nothing_else(
    steps, ranks, total, form, dtype, pages, count, offset
):
    prefill, decode = ranks
    held = max(1, total // decode)
    each = max(1, total // prefill) if prefill > decode else held
    if total % prefill and prefill % total:
        return
    pool = Pool(form, heads=held, dtype=dtype)
    before = pool.content()
    ids = torch.tensor(pages[:count])
    copies = max(1, prefill // total)
    places = max(prefill // decode, 1)
    width = before[0].shape[-1]
    region = torch.randint(0, 256, (places, len(before), count, pool.page, each, width), dtype=torch.uint8)
    for place in range(places):  # ranks that replicate a head hold the same
        region[place] = region[place // copies * copies]
    ring = ring_of(region.numel(), offset)
    ring[:] = region.reshape(-1)
    steps.scatter(ring, pool.k, pool.v, ids, pool.page, prefill, decode, 0, total)
    for plane, (old, new) in enumerate(zip(before, pool.content(), strict=True)):
        for place in range(places):
            head = place // copies * each % held
            old[ids, :, head : head + each] = region[place, plane]
        assert torch.equal(old, new)


@given(
    widths=st.lists(st.sampled_from([576, 1152, 132, 7]), min_size=1, max_size=4), more=st.sampled_from([0, 64, 5]),
    rows=st.permutations(range(9)), count=st.integers(0, 9), given_strides=st.booleans(),
)  # fmt: skip
def test_rows_of_latents_are_gathered_plane_by_plane(steps, widths, more, rows, count, given_strides):
    more = more if given_strides else 0
    planes = [torch.randint(0, 256, (9, width + more), dtype=torch.uint8) for width in widths]
    index = torch.tensor(rows[:count], dtype=torch.int64)
    wanted = torch.cat([plane[index, :width].reshape(-1) for plane, width in zip(planes, widths, strict=True)])
    pack = ring_of(wanted.numel() + 9)
    strides = [width + more for width in widths] if given_strides else None
    steps.rows([plane.data_ptr() for plane in planes], index, pack, widths, strides)
    assert torch.equal(pack[: wanted.numel()], wanted)


def test_rows_of_planes_that_interleave(steps):
    """All planes of a token side by side in one allocation, as in a pool by pages."""
    held = torch.randint(0, 256, (9, 4, 64), dtype=torch.uint8)
    pack = ring_of(4 * 5 * 64)
    for rows in ([2, 0, 1, 4, 3], [8, 0, 1, 3, 4]):
        index = torch.tensor(rows)
        steps.rows([held[0, plane].data_ptr() for plane in range(4)], index, pack, [64] * 4, [256] * 4)
        assert torch.equal(pack.view(4, 5, 64), held[index].transpose(0, 1))


def test_a_narrower_v_leaves_the_rest_of_its_planes(steps):
    pool = Pool("nhd", dim=24, v_dim=16)
    ids = np.array([3, 1])
    ring = torch.zeros(4 * 2 * 4 * 4 * 24, dtype=torch.uint8)
    assert steps.gather(pool.k, pool.v, ids, SimpleNamespace(buffer=ring), 0, 4, 4) == ring.numel()
    for plane, (held, wanted) in enumerate(zip(ring.view(4, -1), pool.content(), strict=True)):
        flat = wanted[ids].reshape(-1)
        assert torch.equal(held[: flat.numel()], flat), plane
    other = Pool("nhd", dim=24, v_dim=16, seed=1)
    steps.scatter(ring, other.k, other.v, torch.tensor([0, 4]), 4, 1, 1, 0, 4)
    assert all(torch.equal(a[[3, 1]], b[[0, 4]]) for a, b in zip(pool.content(), other.content(), strict=True))


def test_pages_of_other_sizes_meet_in_the_ring(steps):
    """The ring counts tokens: an end with pages of 2 tokens and another with pages of 8."""
    small, large = Pool("nhd", pages=8, page=2), Pool("nhd", pages=2, page=8, seed=1)
    ring = ring_of(16 * 4 * 4 * 16)
    ids = np.array([7, 0, 3, 2, 4, 1, 6, 5])
    nbytes = steps.gather(small.k, small.v, ids, SimpleNamespace(buffer=ring), 0, 4, 2)
    assert nbytes == ring.numel()
    steps.scatter(ring, large.k, large.v, torch.tensor([1, 0]), 8, 1, 1, 0, 4)
    for a, b in zip(small.content(), large.content(), strict=True):
        assert torch.equal(a[ids].reshape(2, 8, 4, 16), b[[1, 0]])


@pytest.mark.parametrize(("prefill", "decode"), [(4, 6), (6, 4), (3, 2), (2, 3), (12, 8), (24, 4), (4, 24)])
def test_ranks_of_any_numbers_meet_in_the_ring(steps, prefill, decode):
    """Twelve heads over numbers of ranks that need not divide each other, and pages of two sizes."""
    total = 24 if 8 in (prefill, decode) else 12
    model = Pool("nhd", pages=8, page=2, heads=total)
    ids, others = np.array([7, 0, 3, 2, 4, 1, 6, 5]), torch.tensor([1, 0])
    for rank in range(decode):
        count = max(1, total // decode)
        mine = Pool("nhd", pages=2, page=8, heads=count, seed=1)
        region, parts = [], []
        for other in range(prefill):
            shared = shared_heads(prefill, other, decode, rank, total)
            if shared is None:
                continue
            (first, heads), there = shared
            begin = other * total // prefill
            held = slice(begin, begin + max(1, total // prefill))
            ring = ring_of(4 * 16 * heads * 16)
            k, v = ([tensor[:, held] for tensor in half] for half in (model.k, model.v))
            steps.gather(k, v, ids, SimpleNamespace(buffer=ring), first, heads, 2)
            region.append(ring)
            parts.append(there)
        steps.scatter_heads(torch.cat(region), mine.k, mine.v, others, 8, parts)
        begin = rank * total // decode
        for a, b in zip(model.content(), mine.content(), strict=True):
            assert torch.equal(a[ids].reshape(2, 8, total, 16)[:, :, begin : begin + count], b[[1, 0]])


def test_parts_that_share_heads_are_refused(steps):
    pool = Pool("nhd")
    with pytest.raises(OverlapError, match="head 1 is in two parts"):
        steps.scatter_heads(ring_of(9999), pool.k, pool.v, torch.tensor([1]), 4, [Heads(0, 2), Heads(1, 2)])
    steps.scatter_heads(ring_of(9999), pool.k, pool.v, torch.tensor([1]), 4, [])
    with pytest.raises(KVPlanError, match="12 heads over 5 ranks"):
        shared_heads(5, 0, 4, 0, 12)


def test_latents_without_v_go_through_the_ring(steps):
    """MLA: one head of 576 bytes a token, pages of one token."""
    a, b = (Pool("nhd", pages=9, page=1, heads=1, dim=576, seed=seed) for seed in (0, 1))
    ring = ring_of(2 * 9 * 576)
    ids = np.random.default_rng(0).permutation(9)
    steps.gather(a.k, [], ids, SimpleNamespace(buffer=ring), 0, 1, 1)
    steps.scatter(ring, b.k, [], torch.arange(9), 1, 4, 4, 3, 1)
    assert all(torch.equal(x[torch.from_numpy(ids)], y) for x, y in zip(a.k, b.k, strict=True))


def test_a_run_group_is_made_once_for_a_number_of_pages(steps):
    pool = Pool("nhd")
    ring = SimpleNamespace(buffer=ring_of(5 * 4 * 4 * 4 * 16))
    made = steps._pool(pool.k, pool.v, ring.buffer, 4, 0, 4)
    for ids in ([0, 1], [4, 2], [3]):
        steps.gather(pool.k, pool.v, np.array(ids), ring, 0, 4, 4)
    assert steps._pool(pool.k, pool.v, ring.buffer, 4, 0, 4) is made
    assert sum(len(planes._groups) for planes in made.planes) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_indices_np": np.array([0, 5])}, BlockIndexError, r"page_indices\[1\] is 5; the pool has pages 0 to 4"),
        ({"page_indices_np": np.array([-1])}, BlockIndexError, "is -1"),
        ({"src_head_start": 3, "num_heads": 2}, LayoutError, "heads 3 to 4 of tensors with 4 heads"),
        ({"num_heads": 0}, LayoutError, "num_heads is 0"),
        ({"k_buffers": [], "v_buffers": []}, LayoutError, "K is on none, the ring on cpu"),
        ({"staging_buffer": SimpleNamespace(buffer=torch.zeros(9, dtype=torch.uint8))}, KVPlanError,
         "2 pages take 2,048 bytes of the ring; it has 9"),
        ({"k_buffers": [torch.zeros(4)]}, LayoutError, "a tensor of 1 dims"),
    ],
)  # fmt: skip
def test_what_a_gather_refuses(steps, change, error, message):
    pool = Pool("nhd")
    given_ = {"k_buffers": pool.k, "v_buffers": pool.v, "page_indices_np": np.array([0, 1]),
              "staging_buffer": SimpleNamespace(buffer=ring_of(4096)), "src_head_start": 0, "num_heads": 4,
              "page_size": 4}  # fmt: skip
    with pytest.raises(error, match=message):
        steps.gather(**given_ | change)


def test_a_wider_v_is_refused(steps):
    pool = Pool("nhd", dim=16, v_dim=24)
    with pytest.raises(LayoutError, match="no other may be wider"):
        steps.gather(pool.k, pool.v, np.array([0]), SimpleNamespace(buffer=ring_of(9999)), 0, 4, 4)


def test_what_a_scatter_refuses(steps):
    pool = Pool("nhd")
    with pytest.raises(OverlapError, match="a page is given twice"):
        steps.scatter(ring_of(9999), pool.k, pool.v, torch.tensor([1, 1]), 4, 1, 1, 0, 4)
    with pytest.raises(KVPlanError, match="decode rank 0 has 2 heads, its pool 4"):
        steps.scatter(ring_of(9999), pool.k, pool.v, torch.tensor([1]), 4, 1, 2, 0, 4)
    with pytest.raises(KVPlanError, match="4 pages take 4,096 bytes of the ring; it has 99"):
        steps.scatter(ring_of(99), pool.k, pool.v, torch.arange(4), 4, 1, 1, 0, 4)


def test_what_rows_refuse(steps):
    with pytest.raises(KVPlanError, match="1 addresses, 2 widths and 2 strides"):
        steps.rows([4096], torch.tensor([0]), ring_of(9), [8, 8])
    with pytest.raises(KVPlanError, match="a width is 0"):
        steps.rows([4096], torch.tensor([0]), ring_of(9), [0])


@pytest.mark.parametrize("ranks", [(3, 2), (2, 3), (6, 4)])
def test_ranks_that_sglang_does_not_connect_are_refused(ranks):
    with pytest.raises(KVPlanError, match="only if one number divides the other"):
        written_heads(*ranks, 12)


def test_writers_that_lack_a_head_are_refused():
    with pytest.raises(KVPlanError, match="no rank of prefill writes head 2"):
        written_heads(4, 2, 6)


def fake_sglang(monkeypatch, **changed):
    """SGLang's functions with SGLang's arguments, which do nothing."""

    def gather(k_buffers, v_buffers, page_indices_np, staging_buffer, src_head_start, num_heads, page_size):
        return "own"

    def scatter(staging_buffer_view, k_buffers, v_buffers, page_idx_tensor, page_size, prefill_attn_tp_size,
                decode_attn_tp_size, dst_tp_rank, total_kv_heads):  # fmt: skip
        return "own"

    def rows(kv_data_ptrs, row_indices, pack, token_item_lens, src_token_item_lens=None):
        return "own"

    own = dict(zip(("gather", "scatter", "rows"), (gather, scatter, rows), strict=True)) | changed
    for served in staging_hooks.SERVED:
        module = ModuleType(served.module)
        monkeypatch.setitem(sys.modules, served.module, module)
    for served in staging_hooks.SERVED:
        if own[served.step] is not None:
            setattr(sys.modules[served.module], served.name, own[served.step])
    return own


def hooked(**named):
    found = {}
    steps = staging_hooks.hook_staging(Policy(), found.__setitem__, **named)
    return steps, found


def test_hooks_serve_the_three_functions(monkeypatch):
    own = fake_sglang(monkeypatch)
    steps, found = hooked()
    assert sorted(name.rsplit(".", 1)[1] for name in found) == [
        "copy_mla_rows_into_pack", "gather_all_layers_to_staging", "scatter_staging_to_kv",
    ]  # fmt: skip
    pool = Pool("nhd")
    gather = found["sglang.srt.disaggregation.common.staging_buffer.gather_all_layers_to_staging"]
    ring = SimpleNamespace(buffer=ring_of(4096))
    assert gather(own["gather"], pool.k, pool.v, np.array([1]), ring, 0, 4, page_size=4) == 1024
    assert torch.equal(ring.buffer[:256], pool.k[0][4:8].reshape(-1))
    there = SimpleNamespace(buffer=SimpleNamespace(device=torch.device("xpu:0")))
    assert gather(own["gather"], [], [], np.array([1]), there, 0, 4, 4) == "own"
    assert gather(own["gather"], [], [], np.array([1]), staging_buffer=there, src_head_start=0, num_heads=4,
                  page_size=4) == "own"  # fmt: skip
    with pytest.raises(KVPlanError, match="vectorized_5d; SGLang counts the bytes of a message by the last dim"):
        gather(own["gather"], Pool("vectorized_5d").k, pool.v, np.array([1]), ring, 0, 4, 4)
    rows = found["sglang.kernels.ops.kvcache.pd_dcp_gather.copy_mla_rows_into_pack"]
    rows(own["rows"], [pool.k[0].data_ptr()], torch.tensor([2]), ring.buffer, [64])
    assert torch.equal(ring.buffer[:64], pool.k[0][2].reshape(-1))
    steps.close()


def test_a_function_that_is_missing_or_differs_is_refused(monkeypatch):
    fake_sglang(monkeypatch, rows=None)
    registered = []
    with pytest.raises(KVPlanError, match=r"SGLang has no .*copy_mla_rows_into_pack here .*KVPLAN_SGLANG_STAGING"):
        staging_hooks.hook_staging(Policy(), lambda target, hook: registered.append(target))
    assert registered == []  # SGLang logs the error, and goes on with its own functions only
    fake_sglang(monkeypatch, gather=lambda k_buffers, page_size: None)
    with pytest.raises(KVPlanError, match="takes k_buffers, page_size, not k_buffers, v_buffers, page_indices_np"):
        hooked()


def test_the_version_is_checked(monkeypatch):
    fake_sglang(monkeypatch)
    asked = []
    monkeypatch.setattr(versions, "check", asked.append)
    hooked()[0].close()
    assert asked == [versions.SGLANG]


def test_the_plugin_hooks_what_the_variables_ask_for(monkeypatch):
    fake_sglang(monkeypatch)
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registered = []
    registry.HookType = SimpleNamespace(AFTER="after", AROUND="around")
    registry.HookRegistry = SimpleNamespace(register=lambda target, hook, kind: registered.append((target, kind)))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.delenv("KVPLAN_SGLANG", raising=False)
    monkeypatch.delenv("KVPLAN_SGLANG_STAGING", raising=False)
    plugin.plugin()
    assert registered == []
    monkeypatch.setenv("KVPLAN_SGLANG_STAGING", "kernel")
    plugin.plugin()
    assert registered == [(served.target, "around") for served in staging_hooks.SERVED]
    monkeypatch.setenv("KVPLAN_SGLANG", "auto")
    monkeypatch.setenv("KVPLAN_SGLANG_STAGING", "0")
    registered.clear()
    plugin.plugin()
    assert registered == [(plugin.CONTROLLER, "after")]
