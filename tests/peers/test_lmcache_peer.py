"""LMCache 0.5.6: its enum, its allocator's objects, and bytes that its own transfer moves, held against ours."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch

import kvplan
from kvplan.backends import lmcache
from tests.backends.rows import hold_every_row

pytestmark = pytest.mark.peers

if not importlib.util.find_spec("lmcache"):
    pytest.skip("lmcache is not installed", allow_module_level=True)
with warnings.catch_warnings():  # its imports use what others deprecate
    warnings.simplefilter("ignore")
    from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
    from lmcache.v1.gpu_connector.kv_format.specs import get_spec
    from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.platform.torch_ops.mp_mem_kernels import multi_layer_block_kv_transfer

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 6, 4, 2, 8
CHUNK = 2 * TOKENS
SIZES = {"NL": LAYERS, "TWO": 2, "NB": BLOCKS, "BS": TOKENS, "NH": HEADS, "HS": DIM, "CS": 2 * DIM,
         "NBBS": BLOCKS * TOKENS, "ONE": 1}  # fmt: skip
MOVED = [f for f in EngineKVFormat.__members__ if not {"NP", "BSV"} & set(f.split("_")) and f != "NL_X_NB_BS_NH_HS"]
LATENT = [f for f in MOVED if not {"NH", "CS"} & set(f.split("_"))]


def cache_of(name):
    *lists, dims = name.split("_X_")
    shape = [SIZES[letter] for letter in dims.split("_")]

    def nest(counts):
        if not counts:
            return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.float16)
        return [nest(counts[1:]) for _ in range(counts[0])]

    return nest([SIZES[letter] for letter in lists])


def test_the_enum_has_our_formats_in_our_order():
    assert tuple(EngineKVFormat.__members__) == lmcache.ENGINE_FORMATS
    assert [int(member) for member in EngineKVFormat.__members__.values()] == list(range(len(lmcache.ENGINE_FORMATS)))


@pytest.mark.filterwarnings("ignore")  # it has deprecated two of its formats
@pytest.mark.parametrize("name", MOVED)
def test_geometry(name):
    tensors = cache_of(name)
    spec = get_spec(tensors, EngineKVFormat.__members__[name])
    layout = lmcache.describe(tensors, engine_format=name, block_tokens=TOKENS)
    assert len(layout.layers) == spec.num_layers()
    assert layout.num_blocks * layout.block_tokens == spec.page_buffer_size() == spec.tokens_per_layer()
    if not spec.is_pbs_fused:
        assert (layout.num_blocks, layout.block_tokens) == (spec.num_blocks(), spec.block_size())
    if name not in LATENT:
        assert len(layout.heads) == spec.num_heads()
    assert layout.block_nbytes == LAYERS * spec.kv_size() * TOKENS * spec.num_heads() * spec.head_size() * 2
    first = {layout.address(layer=layer, part=part) for layer in layout.layers for part in layout.parts}
    assert set(spec.data_ptrs(list(range(LAYERS)))) <= first


@pytest.mark.parametrize("name", MOVED)
def test_its_transfer_and_ours_fill_the_same_objects(name, executor):
    tensors, packed = cache_of(name), "CS" in name or "TWO_HS" in name
    planes = (LAYERS,) if packed or name in LATENT else (2, LAYERS)
    width = DIM if name in LATENT else HEADS * DIM * (2 if packed else 1)
    theirs, ours = (
        [torch.zeros(*planes, CHUNK, width, dtype=torch.float16) for _ in range(2)] for _ in range(2)
    )  # fmt: skip
    shape = PageBufferShapeDesc()
    shape.nl, shape.nb, shape.bs = LAYERS, BLOCKS, TOKENS
    shape.nh, shape.hs = (1, DIM) if name in LATENT else (HEADS, DIM * (2 if packed else 1))
    shape.kv_size, shape.element_size = len(planes), 2
    ids = [5, 2, 0, 3]
    # Its transfer on the CPU takes no sixth dim, of extent 1: the bytes are those of the format without.
    given = [tensor.squeeze(3) for tensor in tensors] if "NH_ONE_BS" in name else tensors
    member = EngineKVFormat.__members__[name.replace("NH_ONE_BS", "NH_BS")]
    multi_layer_block_kv_transfer(given, theirs, ids, "cpu", TransferDirection.D2H, shape, CHUNK, member, 0)
    src = lmcache.describe(tensors, engine_format=name, block_tokens=TOKENS)
    dst = lmcache.describe(ours, heads=None if name in LATENT else HEADS)
    executor.submit(kvplan.compile(src, dst).plan(ids, [0, 1])).synchronize()
    for there, here in zip(theirs, ours, strict=True):
        assert there.view(torch.int16).any()
        assert torch.equal(there.view(torch.int16), here.view(torch.int16))


@pytest.mark.parametrize(
    ("fmt", "shape"), [("KV_2LTD", (2, LAYERS, CHUNK, HEADS * DIM)), ("KV_MLA_FMT", (1, LAYERS, CHUNK, DIM))]
)
def test_objects_of_its_paged_allocator(fmt, shape):
    size, kind = torch.Size(shape), MemoryFormat[fmt]
    buffer = torch.zeros(5 * size.numel() * 2, dtype=torch.uint8)
    allocator = PagedTensorMemoryAllocator(buffer, [size], [torch.float16], kind)
    objects = [allocator.allocate([size], [torch.float16], kind) for _ in range(3)]
    layout = lmcache.describe(objects, heads=HEADS if fmt == "KV_2LTD" else None)
    assert (layout.num_blocks, layout.block_tokens) == (3, CHUNK)
    tensors = [memory_object.tensor for memory_object in objects]
    hold_every_row(layout, lambda layer, kv, block, token, head: tensors[block][kv, layer, token, head * DIM :])
    pool = buffer.view(torch.float16).view(5, *shape)
    whole = lmcache.describe(pool, object_format=fmt, heads=HEADS if fmt == "KV_2LTD" else None)
    assert whole.address(layer=2, part=whole.parts[-1], block=0) == layout.address(
        layer=2, part=layout.parts[-1], block=0
    )
    for memory_object in objects:
        memory_object.ref_count_down()
