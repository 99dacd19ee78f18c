"""cross_layer: one tensor for all layers, in any order."""

from itertools import permutations

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError, NotationError
from kvplan.backends import cross_layer
from tests.backends.rows import hold_every_row

SIZES = {"block": 3, "layer": 2, "kv": 2, "token": 4, "head": 2, "dim": 8}


def test_the_default():
    pool = torch.zeros(3, 2, 2, 4, 2, 8, dtype=torch.bfloat16)
    layout = cross_layer.describe(pool)
    assert layout.notation == "block layer kv token head dim"
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (3, 4, 512)
    assert (layout.layers, layout.parts, layout.heads) == ((0, 1), ("k", "v"), range(2))
    expected = pool.data_ptr() + 2 * 512 + 256 + 128 + 3 * 32 + 16
    assert layout.address(layer=1, part="v", block=2, token=3, head=1) == expected
    hold_every_row(layout, lambda layer, kv, block, token, head: pool[block, layer, kv, token, head])


@pytest.mark.parametrize("order", list(permutations(("block", "layer", "kv", "token", "head")))[::5])
def test_permutations(order):
    pool = np.zeros([SIZES[axis] for axis in (*order, "dim")], np.float16)
    layout = cross_layer.describe(pool, " ".join((*order, "dim")), layer_start=4, head_start=2)
    assert (layout.layers, layout.heads, layout.block_nbytes) == ((4, 5), range(2, 4), 512)

    def row(*index):
        where = dict(zip(("layer", "kv", "block", "token", "head"), index, strict=True))
        return pool[tuple(slice(where[axis], where[axis] + 1) for axis in order)]

    hold_every_row(layout, row)


def test_permuted_storage_equals_its_own_notation():
    pool = torch.zeros(3, 2, 2, 2, 4, 8, dtype=torch.int8)  # block layer kv head token dim
    permuted = cross_layer.describe(pool.transpose(3, 4))
    assert permuted == cross_layer.describe(pool, "block layer kv head token dim")


def test_vllm_block_outer_order_with_fused_content():
    pool = torch.zeros(3, 2, 4, 16, 2 * 8, dtype=torch.float16)  # BLHNC
    layout = cross_layer.describe(pool, "block layer head token (kv dim)")
    assert (layout.heads, layout.block_tokens, layout.block_nbytes) == (range(4), 16, 4096)
    assert layout.address(layer=0, part="v") == pool.data_ptr() + 16
    hold_every_row(layout, lambda layer, kv, block, token, head: pool[block, layer, head, token, 8 * kv :])


def test_padded_blocks_sizes_layers_part_and_seams():
    storage = np.zeros((3, 300), np.uint8)  # 256 bytes of content a block
    pool = storage[:, :256].reshape(3, 2, 128)  # a view
    seam = storage[1].ctypes.data
    layout = cross_layer.describe(
        pool, "block layer (token dim)", sizes={"token": 4}, layers=[1, 5], part="latent", seams=[seam]
    )
    assert (layout.block_nbytes, layout.block_tokens) == (256, 4)
    assert (layout.layers, layout.parts, layout.seams) == ((1, 5), ("latent",), (seam,))
    address = layout.address(layer=5, part="latent", block=2, token=3)
    assert address == storage.ctypes.data + 2 * 300 + 128 + 3 * 32


def test_two_pools_of_one_order_copy_a_block_in_one_run():
    src, dst = (cross_layer.describe(np.zeros((4, 3, 2, 8, 2, 16), np.int8)) for _ in range(2))
    program = kvplan.compile(src, dst)
    assert (program.runs, program.run_nbytes) == (1, (1536, 1536))


POOL = np.zeros((3, 2, 2, 4, 2, 8), np.int8)


@pytest.mark.parametrize(
    ("tensor", "notation", "error", "message"),
    [
        ([POOL[0]], "layer: block kv token head dim", LayoutError, "nests tensors; cross-layer is one tensor, so"),
        (POOL, "block: layer kv token head dim", LayoutError, "without ':'"),
        (POOL[0], "block kv token head dim", LayoutError, "'block kv token head dim' has no layer dim"),
        ([POOL], "block layer kv token head dim", LayoutError, "tensor is a list; cross-layer is one tensor for all"),
        (POOL[0], "block layer kv token head dim", LayoutError, "has 6 dims; the tensor's shape .* has 5"),
        (POOL, "block layers kv token head dim", NotationError, "unknown axis 'layers' .* at column 7"),
        (POOL, "kv layer block token head dim", LayoutError, "dim of extent 3 .* cannot be kv=2"),
    ],
)
def test_refusals(tensor, notation, error, message):
    with pytest.raises(error, match=message):
        cross_layer.describe(tensor, notation)
