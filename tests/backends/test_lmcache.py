"""lmcache's memory objects: in lists, layerwise, packed and pooled; its engine formats have a file of their own."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import lmcache
from tests.backends.rows import hold_every_row

Format = Enum("Format", "UNDEFINED KV_2LTD KV_T2D KV_2TD BINARY BINARY_BUFFER KV_MLA_FMT")


@dataclass
class Metadata:
    fmt: Format
    shapes: list


@dataclass
class TensorMemoryObj:
    """As the engine's: a slice of a buffer of bytes, viewed by its metadata, group after group."""

    raw_data: torch.Tensor
    shapes: list
    dtype: torch.dtype
    fmt: Format = Format.KV_2LTD
    metadata: Metadata = field(init=False)

    def __post_init__(self):
        self.metadata = Metadata(self.fmt, self.shapes)

    def get_tensor(self, index):
        sizes = [int(np.prod(shape)) * self.dtype.itemsize for shape in self.shapes]
        begin = sum(sizes[:index])
        return self.raw_data[begin : begin + sizes[index]].view(self.dtype).view(self.shapes[index])

    @property
    def tensor(self):
        assert len(self.shapes) == 1, "the engine's raises"
        return self.get_tensor(0)


def objects_of(count, *shapes, fmt=Format.KV_2LTD, align=4096, dtype=torch.float16):
    """Objects cut out of one pinned buffer, as the allocators do, and not in order."""
    nbytes = sum(int(np.prod(shape)) * dtype.itemsize for shape in shapes)
    step = -(-nbytes // align) * align
    buffer = torch.zeros(count * step, dtype=torch.uint8)
    starts = [((k * 5 + 1) % count) * step for k in range(count)]
    return [TensorMemoryObj(buffer[s : s + nbytes], list(shapes), dtype, fmt) for s in starts]


def test_objects_of_k_and_v():
    objects = objects_of(4, (2, 3, 8, 16))
    layout = lmcache.describe(objects, heads=2, layer_start=7, head_start=2)
    assert layout.notation == "block: kv layer token (head dim)"
    assert (layout.layers, layout.parts, layout.heads) == ((7, 8, 9), ("k", "v"), range(2, 4))
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (4, 8, 1536)
    assert (
        layout.address(layer=8, part="v", block=1, token=5, head=3) == objects[1].raw_data.data_ptr() + 768 + 416 + 16
    )
    tensors = [o.tensor.view(2, 3, 8, 2, 8) for o in objects]
    hold_every_row(layout, lambda layer, kv, block, token, head: tensors[block][kv, layer, token, head])
    assert layout == lmcache.describe(tensors, layer_start=7, head_start=2)  # heads in a dim of their own
    assert layout == lmcache.describe([o.tensor for o in objects], heads=2, layer_start=7, head_start=2, block_tokens=8)


def test_bytes_of_a_default_chunk():
    """Llama-3.1-70B at TP 4: 80 layers, 2 heads of 128, bf16; a chunk of 256 tokens is 16 blocks of 1,310,720."""
    layout = lmcache.describe([torch.empty(2, 80, 256, 256, dtype=torch.bfloat16)], heads=2)
    assert (layout.block_tokens, layout.block_nbytes) == (256, 16 * 1_310_720)
    one_layer = lmcache.describe([torch.empty(2, 1, 16, 8 * 128, dtype=torch.bfloat16)], heads=8)
    assert one_layer.block_nbytes == 65_536


def test_one_object_is_one_block():
    (alone,) = objects_of(1, (2, 3, 8, 16))
    layout = lmcache.describe(alone, heads=2)
    assert (layout.notation, layout.num_blocks) == ("kv layer token (head dim)", 1)
    assert layout == lmcache.describe([alone], heads=2)


@pytest.mark.parametrize(("heads", "shape"), [(2, (5, 2, 3, 8, 16)), (None, (5, 2, 3, 8, 2, 8))])
def test_a_pool_of_objects(heads, shape):
    pool = np.zeros(shape, np.float16)
    layout = lmcache.describe(pool, heads=heads)
    assert layout.notation == f"block kv layer token {'(head dim)' if heads else 'head dim'}"
    assert (layout.num_blocks, layout.block_nbytes) == (5, 1536)
    rows = pool.reshape(5, 2, 3, 8, 2, 8)
    hold_every_row(layout, lambda layer, kv, block, token, head: rows[block, kv, layer, token, head])
    assert layout == lmcache.describe(list(pool), heads=heads)


@pytest.mark.parametrize("fmt", [Format.KV_MLA_FMT, Format.KV_2LTD])
@pytest.mark.parametrize("shape", [(1, 3, 8, 16), (3, 8, 16)])
def test_latent_objects(fmt, shape):
    objects = objects_of(4, shape, fmt=fmt)
    layout = lmcache.describe(objects)
    assert layout.notation == f"block: {'1 ' if len(shape) == 4 else ''}layer token dim"
    assert (layout.parts, layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (("kv",), 4, 8, 768)
    tensors = [o.tensor.view(3, 8, 16) for o in objects]
    hold_every_row(layout, lambda layer, kv, block, token, head: tensors[block][layer, token])
    alone = lmcache.describe(objects[0])
    assert (alone.num_blocks, alone.block_tokens, alone.block_nbytes) == (1, 8, 768)
    assert alone.address(layer=2, part="kv", token=7) == objects[0].raw_data.data_ptr() + 512 + 224


@pytest.mark.parametrize("shape", [(5, 3, 8, 16), (5, 1, 3, 8, 16)])
def test_a_pool_of_latents(shape):
    pool = np.zeros(shape, np.float16)
    layout = lmcache.describe(pool, object_format="KV_MLA_FMT", part="index")
    assert (layout.num_blocks, layout.layers, layout.parts, layout.block_nbytes) == (5, (0, 1, 2), ("index",), 768)
    rows = pool.reshape(5, 3, 8, 16)
    hold_every_row(layout, lambda layer, kv, block, token, head: rows[block, layer, token])


def test_k_and_v_packed_in_one_plane():
    """Objects of the engine formats that end in CS: of each head K, then V."""
    objects = objects_of(3, (1, 2, 8, 4 * 2 * 6))
    layout = lmcache.describe(objects, heads=4)
    assert layout.notation == "block: 1 layer token (head kv dim)"
    assert (layout.parts, layout.heads, layout.block_nbytes) == (("k", "v"), range(4), 2 * 8 * 48 * 2)
    tensors = [o.tensor.view(2, 8, 4, 2, 6) for o in objects]
    hold_every_row(layout, lambda layer, kv, block, token, head: tensors[block][layer, token, head, kv])


@pytest.mark.parametrize(("name", "shape"), [("KV_T2D", (8, 2, 16)), ("KV_2TD", (2, 8, 16)), ("KV_MLA_FMT", (8, 16))])
def test_layerwise_objects(name, shape):
    layers = [objects_of(4, shape, fmt=Format[name]) for _ in range(3)]
    latent = name == "KV_MLA_FMT"
    layout = lmcache.describe(layers, heads=None if latent else 2)
    assert layout.notation.startswith("layer block: ")
    assert (layout.layers, layout.num_blocks, layout.block_tokens) == ((0, 1, 2), 4, 8)
    assert layout.block_nbytes == 3 * 8 * 16 * 2 * (1 if latent else 2)

    def row(layer, kv, block, token, head):
        tensor = layers[layer][block].tensor
        if latent:
            return tensor[token]
        return (tensor[token, kv] if name == "KV_T2D" else tensor[kv, token])[8 * head :]

    hold_every_row(layout, row)


def test_one_kernel_group_of_several():
    """Gemma's kind: full layers and sliding ones in one object, group after group."""
    objects = objects_of(4, (2, 3, 8, 16), (2, 5, 8, 32))
    with pytest.raises(LayoutError, match=r"TensorMemoryObj holds 2 kernel groups .* name one with group="):
        lmcache.describe(objects, heads=2)
    layout = kvplan.KVLayout.merge([
        lmcache.describe(objects, heads=2, group=0, layers=[0, 4, 8]),
        lmcache.describe(objects, heads=4, group=1, layers=[1, 2, 3, 5, 6]),
    ])  # fmt: skip
    assert layout.block_nbytes == 2 * 8 * 2 * (3 * 16 + 5 * 32)
    assert layout.address(layer=1, part="k", block=2) == objects[2].raw_data.data_ptr() + 1536


class Freed:
    tensor = None

    def get_tensor(self, index):
        return None


TWO = np.zeros((2, 3, 8, 16), np.float16)
CASES = {
    "heads missing": ([TWO], {}, r"shape \(2, 3, 8, 16\) is no KV_2LTD object, 'kv layer token head dim'; give heads="),
    "heads of none": ([TWO], {"heads": 3}, "dim of extent 16 .* cannot be head=3"),
    "other tokens": ([TWO], {"heads": 2, "block_tokens": 256}, "dim of extent 8 .* cannot be token=256"),
    "three planes": ([np.zeros((3, 3, 8, 16))], {"heads": 2}, "dim of extent 3 .* cannot be kv=2"),
    "latent of two": ([TWO], {"object_format": "KV_MLA_FMT"}, r"\(2, 3, 8, 16\) is no KV_MLA_FMT object"),
    "short chunk": ([TWO, TWO[:, :, :5]], {"heads": 2}, "tensor 1 has shape .2, 3, 5, 16., tensor 0 has"),
    "layerwise unsaid": ([[TWO]], {"heads": 2}, "object_format is 'KV_2LTD' of lists nested 2 deep; .* KV_T2D, KV_2TD"),
    "layerwise flat": ([TWO], {"object_format": "KV_T2D"}, "object_format is 'KV_T2D' of a list; .* KV_2LTD, KV_MLA_"),
    "one layerwise": (TWO, {"object_format": "KV_2TD"}, "object_format is 'KV_2TD' of one tensor"),
    "deep": ([[[TWO]]], {}, "of lists nested 3 deep"),
    "bytes": ([TWO], {"object_format": "BINARY"}, "object_format is 'BINARY'"),
    "none": ([], {}, "no memory objects"),
    "group of tensors": ([TWO], {"group": 1, "heads": 2}, "group= is of memory objects; got tensors"),
    "freed": ([Freed()], {"heads": 2}, "Freed has no tensor: it was freed"),
    "text": (["object"], {}, "expected a memory object or a tensor; got str"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        lmcache.describe(given, **options)


def test_seams_and_layers():
    buffer = np.zeros((4, 2, 3, 8, 16), np.float16)
    seam = buffer[2].ctypes.data
    layout = lmcache.describe(list(buffer), heads=2, layers=[3, 5, 9], seams=[seam])
    assert (layout.layers, layout.seams) == ((3, 5, 9), (seam,))
