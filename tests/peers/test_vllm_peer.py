"""vLLM 0.33.0 plans, allocates and views the cache with its own code; every address of ours is one of its."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.ops.paged_attn import PagedAttention
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvplan.backends import quantized, vllm
from tests.peers.vllm_worker import allocated

pytestmark = pytest.mark.peers

ORDERS = [layout.name for layout in KVCacheLayout]
PACKING = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")  # those that store a page in one piece
BLOCKS = 5


def spec_of(kind=FullAttentionSpec, **changes):
    defaults = {"block_size": 8, "num_kv_heads": 3, "head_size": 4, "dtype": torch.float16}
    return kind(**(defaults | changes))


def group_of(numbers, spec):
    return KVCacheGroupSpec([f"model.layers.{number}.self_attn.attn" for number in numbers], spec)


def caches_of(groups, order, kernel_block_sizes=None):
    """vLLM's plan and its allocation, for BLOCKS blocks."""
    _, plan, caches = allocated(groups, order, BLOCKS, kernel_block_sizes=kernel_block_sizes)
    return plan, caches


def hold_rows(layout, row):
    """``row(layer, part, block, token, head)`` is vLLM's element; all numbers are global."""
    count = 0
    places = product(layout.layers, layout.parts, range(layout.num_blocks), range(layout.block_tokens), layout.heads)
    for layer, part, block, token, head in places:
        ours = layout.address(layer=layer, part=part, block=block, token=token, head=head)
        assert ours == row(layer, part, block, token, head).data_ptr(), (layer, part, block, token, head)
        count += 1
    return count


def name(layer):
    return f"model.layers.{layer}.self_attn.attn"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_storage_orders(order, heads, dtype):
    spec = spec_of(num_kv_heads=heads, dtype=dtype)
    _, caches = caches_of([group_of((2, 11, 3), spec)], order)
    layout = vllm.describe(caches)
    assert (layout.layers, layout.num_blocks, layout.block_tokens) == ((2, 3, 11), BLOCKS, 8)
    assert layout.block_nbytes == 3 * spec.unpadded_page_size_bytes
    row = lambda layer, part, block, token, head: caches[name(layer)][block, head, token].chunk(2)[part == "v"]  # noqa: E731
    assert hold_rows(layout, row)


@pytest.mark.parametrize("row", [None, 656, 352])
@pytest.mark.parametrize("order", ORDERS)
def test_mla_latents(order, row):
    dtype = torch.bfloat16 if row is None else torch.uint8
    spec = spec_of(MLAAttentionSpec, num_kv_heads=1, head_size=576, dtype=dtype, state_content_bytes=row)
    _, caches = caches_of([group_of((0, 1), spec)], order)
    layout = vllm.describe(caches, head_size_v=spec.head_size_v)
    assert layout.block_nbytes == 2 * 8 * (row or 1152)
    assert hold_rows(layout, lambda layer, part, b, token, head: caches[name(layer)][b, 0, token])


@pytest.mark.parametrize("padding", [{"page_size_padded": 512}, {"block_stride_alignment": 512}])
@pytest.mark.parametrize("order", PACKING)
def test_padded_pages(order, padding):
    spec = spec_of(**padding)  # pages of 384 bytes
    plan, caches = caches_of([group_of((0, 1, 2), spec)], order)
    layout = vllm.describe(caches)
    assert layout.block_nbytes == 3 * 384
    assert layout.regions[0].nbytes == plan.kv_cache_tensors[0].size > layout.nbytes
    assert hold_rows(layout, lambda layer, part, b, token, head:
                   caches[name(layer)][b, head, token, 4 * (part == "v") :])  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_groups_overlay(order):
    """Full attention and a sliding window of one page size: both begin at byte 0."""
    full, window = spec_of(), spec_of(SlidingWindowSpec, sliding_window=16)
    groups = [group_of((0, 2), full), group_of((1, 3), window)]
    _, caches = caches_of(groups, order)
    layouts = [vllm.describe(caches, names=group.layer_names) for group in groups]
    assert [layout.layers for layout in layouts] == [(0, 2), (1, 3)]
    assert layouts[0].address(layer=0, part="k") == layouts[1].address(layer=1, part="k")
    for layout in layouts:
        assert hold_rows(layout, lambda layer, part, b, token, head:
                       caches[name(layer)][b, head, token, 4 * (part == "v") :])  # fmt: skip
    assert vllm.describe(caches).layers == (0, 2)  # as of layers that share a cache: by the addresses they are


@pytest.mark.parametrize("order", PACKING)
def test_layers_of_several_shapes_in_one_group(order):
    specs = {name(layer): spec_of(head_size=size) for layer, size in ((0, 4), (1, 6), (2, 4))}
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=8, kv_cache_specs=specs))
    _, caches = caches_of([group], order)
    layout = vllm.describe(caches)
    assert layout.block_nbytes == sum(spec.page_size_bytes for spec in specs.values())
    assert hold_rows(layout, lambda layer, part, b, token, head:
                   caches[name(layer)][b, head, token].chunk(2)[part == "v"])  # fmt: skip


@pytest.mark.parametrize("kernel", [2, 4, 8])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layers", [(0,), (0, 1)])
@pytest.mark.parametrize("heads", [1, 3])
def test_kernel_blocks(order, kernel, layers, heads):
    spec = spec_of(num_kv_heads=heads)
    group = group_of(layers, spec)
    plan, caches = caches_of([group], order)
    if kernel < 8 and plan.kv_cache_tensors[0].block_stride != spec.page_size_bytes:
        with pytest.raises(ValueError, match="cannot be split into"):
            caches_of([group], order, [kernel])
        return
    if kernel < 8 and order == "BHLNC" and heads > 1:  # one layer: vLLM's check passes, its view leaves the allocation
        with pytest.raises(RuntimeError, match="out of bounds"):
            caches_of([group], order, [kernel])
        return
    plan, caches = caches_of([group], order, [kernel])
    layout = vllm.describe(caches, block_tokens=8)
    assert (layout.num_blocks, layout.block_tokens) == (BLOCKS, 8)
    ratio = 8 // kernel

    def row(layer, part, block, token, head):
        kernel_block = block * ratio + token // kernel
        return caches[name(layer)][kernel_block, head, token % kernel, 4 * (part == "v") :]

    assert hold_rows(layout, row)


@pytest.mark.parametrize("backend", [B12xPagedAttentionBackend, RocmAttentionBackend])
@pytest.mark.parametrize("order", ORDERS)
def test_head_slots(backend, order):
    spec = backend.customize_spec(spec_of())
    assert (spec.num_heads, spec.state_content_size_bytes) == (2, 24)
    _, caches = caches_of([group_of((0, 1), spec)], order)
    layout = vllm.describe(caches, form="head_slots", heads=3)
    sides = {layer: caches[name(layer)].unflatten(-1, (3, 4)).unbind(1) for layer in layout.layers}
    assert hold_rows(layout, lambda layer, part, b, token, head: sides[layer][part == "v"][b, token, head])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", [layout.name for layout in RocmAttentionBackend.supported_kv_cache_layouts()])
def test_x_packed_keys(order, dtype):
    """ROCM_ATTN reads its slots through PagedAttention.split_kv_cache: every element of every row."""
    dim = 32
    spec = RocmAttentionBackend.customize_spec(spec_of(head_size=dim, dtype=dtype))
    _, caches = caches_of([group_of((0, 1), spec)], order)
    layout = vllm.describe(caches, form="paged", heads=3)
    x = 16 // dtype.itemsize
    for layer in layout.layers:
        keys, values = PagedAttention.split_kv_cache(caches[name(layer)].transpose(0, 1), 3, dim)
        for part, b, token, head in product(layout.parts, range(BLOCKS), range(8), range(3)):
            ours = layout.address(layer=layer, part=part, block=b, token=token, head=head)
            for d, start in enumerate(offsets(layout, part)[:: dtype.itemsize]):
                element = keys[b, head, d // x, token, d % x] if part == "k" else values[b, head, d, token]
                assert ours + start == element.data_ptr()


def offsets(layout, part):
    """Bytes from a row's first to each of its bytes."""
    starts = [0]
    for count, stride in layout.component(0, part).form.dim:
        starts = [start + k * stride for start in starts for k in range(count)]
    return starts


@pytest.fixture(scope="module")
def nvfp4_views():
    """`_nvfp4_kv_views`, out of a module that imports FlashInfer, which is not installed."""
    path = Path(importlib.util.find_spec("vllm.v1.attention.backends.flashinfer").origin)
    made = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "_nvfp4_kv_views"]
    if not made:
        pytest.skip("this vLLM has no _nvfp4_kv_views")
    names = {"torch": torch, "nvfp4_split_data_scale": nvfp4_split_data_scale, "_KVPair": tuple}
    exec(compile(ast.Module(made, []), str(path), "exec"), names)
    return names["_nvfp4_kv_views"]


@pytest.mark.parametrize("padded", [None, 1024])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_pages(order, heads, padded, nvfp4_views):
    """Every row of data and of scales, of each head: heads first or tokens first, as the storage order says."""
    spec = spec_of(num_kv_heads=heads, head_size=32, dtype=torch.uint8, page_size_padded=padded)
    spec = replace(spec, num_head_slots=2 * heads, state_content_bytes=nvfp4_kv_cache_full_dim(32))
    if padded and order not in PACKING:
        with pytest.raises(AssertionError, match="Page padding requires"):
            caches_of([group_of((0, 1), spec)], order)
        return
    _, caches = caches_of([group_of((0, 1), spec)], order)
    if order not in PACKING:
        with pytest.raises(ValueError, match="must be dense"):
            nvfp4_views(caches[name(0)], heads)
        return
    for layer in (0, 1):
        (k, v), (k_scale, v_scale), inside = nvfp4_views(caches[name(layer)], heads)
        pages = caches[name(layer)] if inside == "HND" else caches[name(layer)].transpose(1, 2)
        layout = quantized.describe([pages], "nvfp4", kv_layout=inside, head_dim=32)
        assert layout.block_nbytes == 8 * 2 * heads * 18
        for part, view in {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}.items():
            rows = view if inside == "HND" else view.transpose(1, 2)
            for b, head, token in product(range(BLOCKS), range(heads), range(8)):
                ours = layout.address(layer=0, part=part, block=b, head=head, token=token)
                assert ours == rows[b, head, token].data_ptr()


@pytest.mark.parametrize("padded", [None, 1024])
@pytest.mark.parametrize("order", PACKING)
def test_mamba_states(order, padded):
    spec = MambaSpec(
        block_size=8, shapes=((3, 16), (2, 4, 8)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=padded
    )
    _, caches = caches_of([group_of((0, 1), spec)], order)
    layout = vllm.describe(caches, form="whole_blocks", part="state")
    assert layout.block_nbytes == 2 * (96 + 256)
    assert hold_rows(layout, lambda layer, part, b, token, head: caches[name(layer)][b, 0, 0])
