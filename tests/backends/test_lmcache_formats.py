"""lmcache's engine formats: each by its letters, and its bytes moved into memory objects."""

from enum import Enum
from itertools import product

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import lmcache
from tests.backends.rows import hold_every_row

# The enum of 0.5.6 in order, and what each name says; NL_X_NP_X_NB_BS_ONE_HS is refused below.
NOTATIONS = {
    "NB_NL_TWO_BS_NH_HS": "block layer kv token head dim",
    "NL_X_TWO_NB_BS_NH_HS": "layer: kv block token head dim",
    "NL_X_NB_TWO_BS_NH_HS": "layer: block kv token head dim",
    "NL_X_NB_BS_HS": "layer: block token dim",
    "TWO_X_NL_X_NBBS_NH_HS": "kv layer: (block token) head dim",
    "NL_X_NBBS_ONE_HS": "layer: (block token) 1 dim",
    "NL_X_TWO_NB_NH_BS_HS": "layer: kv block head token dim",
    "NL_X_NB_TWO_NH_BS_HS": "layer: block kv head token dim",
    "NB_NL_TWO_NH_BS_HS": "block layer kv head token dim",
    "TWO_X_NL_X_NB_BS_NH_HS": "kv layer: block token head dim",
    "NL_X_NB_NH_BS_TWO_HS": "layer: block head token kv dim",
    "NL_X_NB_BS_NH_TWO_HS": "layer: block token head kv dim",
    "NL_X_NB_NH_BS_CS": "layer: block head token (kv dim)",
    "NL_X_NB_BS_NH_CS": "layer: block token head (kv dim)",
    "NL_X_NB_BSV_BSS": "layer: block dim.0 dim.1",
    "NL_X_TWO_NB_NH_ONE_BS_HS": "layer: kv block head 1 token dim",
    "NL_X_TWO_X_NB_BS_NH_HS": "layer kv: block token head dim",
    "NL_X_NB_BS_NH_HS": "layer: block token head dim",
}
PLANES = "NL_X_NP_X_NB_BS_ONE_HS"
SIZES = {"layer": 2, "kv": 2, "block": 3, "token": 4, "head": 2, "dim": 8}


def test_the_enum_is_covered():
    assert set(lmcache.ENGINE_FORMATS) == {*NOTATIONS, PLANES}
    assert [f for f in lmcache.ENGINE_FORMATS if f != PLANES] == list(NOTATIONS)
    assert lmcache.ENGINE_FORMATS.index(PLANES) == 17


@pytest.mark.parametrize("name", NOTATIONS)
def test_letters(name):
    assert lmcache.notation_of(name) == NOTATIONS[name]


def cache_of(name):
    """A cache as its name spells it, every row filled with its own number; and that array by logical coordinates."""
    *lists, dims = name.split("_X_")
    axis = {"NL": "layer", "TWO": "kv", "NB": "block", "BS": "token", "NH": "head", "HS": "dim", "BSV": "token"}
    spelled = [axis[letter] for letter in lists]
    for letter in dims.split("_"):
        spelled += {"CS": ["kv", "dim"], "NBBS": ["block", "token"], "ONE": ["one"], "BSS": ["dim"]}.get(
            letter, [axis.get(letter)]
        )
    stored = np.arange(np.prod([SIZES.get(a, 1) for a in spelled]), dtype=np.uint32)
    stored = stored.reshape([SIZES.get(a, 1) for a in spelled])
    shape = [{"NBBS": 12, "CS": 16, "ONE": 1, "BSV": 4, "BSS": 8, "TWO": 2}.get(n) or SIZES[axis[n]]
             for n in dims.split("_")]  # fmt: skip

    def nest(part, depth):
        return [nest(item, depth - 1) for item in part] if depth else part.reshape(shape)

    order = [a for a in ("layer", "kv", "block", "token", "head") if a in spelled]
    logical = stored.squeeze(spelled.index("one")) if "one" in spelled else stored
    named = [a for a in spelled if a != "one"]
    logical = logical.transpose([named.index(a) for a in (*order, "dim")])
    return nest(stored, len(lists)), logical, order


@pytest.mark.parametrize("name", [name for name in NOTATIONS if name not in {"NL_X_NB_BSV_BSS", "NL_X_NB_BS_NH_HS"}])
def test_every_row_of_every_format(name):
    tensors, logical, order = cache_of(name)
    tokens = {"block_tokens": 4} if "NBBS" in name else {}
    layout = lmcache.describe(tensors, engine_format=name, layer_start=5, **tokens)
    assert layout.layers == (5, 6)
    assert (layout.num_blocks, layout.block_tokens) == (3, 4)
    assert layout.parts == (("k", "v") if "kv" in order else ("kv",))
    assert layout.block_nbytes == 2 * 4 * 8 * 4 * (2 if "kv" in order else 1) * (2 if "head" in order else 1)

    def row(layer, kv, block, token, head):
        where = {"layer": layer, "kv": kv, "block": block, "token": token, "head": head}
        return logical[tuple(where[axis] for axis in order)]

    assert hold_every_row(layout, row) == np.prod([SIZES[axis] for axis in order])


def test_an_indexer_moves_whole_blocks():
    """132 bytes a token: all values of a block, then all scales."""
    caches = [np.zeros((3, 64, 132), np.uint8) for _ in range(2)]
    layout = lmcache.describe(caches, engine_format="NL_X_NB_BSV_BSS", part="index")
    assert (layout.parts, layout.block_tokens, layout.block_nbytes) == (("index",), 1, 2 * 8448)
    assert layout.address(layer=1, part="index", block=2) == caches[1][2].ctypes.data
    assert kvplan.compile(layout, layout).run_nbytes == (8448, 8448)


def test_objects_that_hold_several_blocks_of_an_indexer(executor):
    """Chunks of 256 tokens are four opaque blocks of 64 in each layer, one after another; 8,448 bytes each."""
    caches = [np.arange(6, dtype=np.uint8).repeat(8448).reshape(6, 64, 132) + 10 * layer for layer in range(2)]
    engine = lmcache.describe(caches, engine_format="NL_X_NB_BSV_BSS", part="index")
    objects = [np.zeros((2, 256, 132), np.uint8) for _ in range(2)]
    pool = lmcache.describe(objects, opaque_tokens=64, part="index")
    assert (pool.num_blocks, pool.block_tokens, pool.block_nbytes) == (2, 4, 2 * 4 * 8448)
    program = kvplan.compile(engine, pool)
    assert (program.unit_tokens, program.run_nbytes) == (1, (8448, 8448))
    executor.submit(program.plan([5, 0, 3, 4, 1], [1, 0])).synchronize()
    assert objects[1][0, ::64, 0].tolist() == [5, 0, 3, 4]
    assert objects[1][1, 63::64, 131].tolist() == [15, 10, 13, 14]
    assert objects[0][0, ::64, 7].tolist() == [1, 0, 0, 0]
    before = [cache.copy() for cache in caches]
    for cache in caches:
        cache[[5, 0, 3, 4, 1]] = 99
    executor.submit(kvplan.compile(pool, engine).plan([1, 0], [5, 0, 3, 4, 1])).synchronize()
    assert all((cache == held).all() for cache, held in zip(caches, before, strict=True))


@pytest.mark.parametrize(("given", "says"), [
    ({"opaque_tokens": 48}, "opaque_tokens is 48; an object holds 256 tokens"),
    ({"opaque_tokens": 64, "heads": 2}, "of one plane without heads; these are 'block: layer token .head kv dim.'"),
    ({"opaque_tokens": 64, "engine_format": "NL_X_NB_BS_HS"}, "and group are of memory objects, and so is opaq"),
])  # fmt: skip
def test_opaque_blocks_that_objects_do_not_hold(given, says):
    with pytest.raises(LayoutError, match=says):
        lmcache.describe([np.zeros((2, 256, 132), np.uint8)], **given)


def test_planes_of_different_widths_are_parts():
    layers = [tuple(torch.zeros(3, 4, 1, width, dtype=torch.bfloat16) for width in (512, 64)) for _ in range(2)]
    with pytest.raises(LayoutError, match=r"NP planes .* describe each plane as 'NL_X_NB_BS_ONE_HS' with a part"):
        lmcache.describe(layers, engine_format=PLANES)
    layout = kvplan.KVLayout.merge([
        lmcache.describe([layer[k] for layer in layers], engine_format="NL_X_NB_BS_ONE_HS", part=part)
        for k, part in enumerate(("ckv", "kpe"))
    ])  # fmt: skip
    assert (layout.parts, layout.block_nbytes) == (("ckv", "kpe"), 9216)
    hold_every_row(layout, lambda layer, part, block, token, head: layers[layer][part][block, token])


def test_single_components_are_named():
    tensors = [np.zeros((3, 4, 2, 8), np.int8) for _ in range(4)]
    with pytest.raises(LayoutError, match=r"lists K and V tensors one by one; .* part='k'"):
        lmcache.describe(tensors, engine_format="NL_X_NB_BS_NH_HS")
    halves = [lmcache.describe(tensors[k : k + 2], engine_format="NL_X_NB_BS_NH_HS", part="kv"[k // 2]) for k in (0, 2)]
    layout = kvplan.KVLayout.merge(halves)
    assert (layout.parts, layout.layers) == (("k", "v"), (0, 1))
    hold_every_row(layout, lambda layer, kv, block, token, head: tensors[2 * kv + layer][block, token, head])


def test_a_member_of_the_enum_serves_as_its_name():
    member = Enum("EngineKVFormat", {"NL_X_NB_BS_HS": 3}).NL_X_NB_BS_HS
    cache = [np.zeros((3, 64, 576), np.uint16)]
    layout = lmcache.describe(cache, engine_format=member)
    assert layout == lmcache.describe(cache, engine_format="NL_X_NB_BS_HS")
    assert layout.block_nbytes == 73_728


@pytest.mark.parametrize("name", [name for name, notation in NOTATIONS.items() if "kv" in notation])
@pytest.mark.parametrize("packed", [False, True])
def test_bytes_move_from_every_format_into_objects(name, packed, executor):
    tensors, logical, _ = cache_of(name)
    tokens = {"block_tokens": 4} if "NBBS" in name else {}
    gpu = lmcache.describe(tensors, engine_format=name, **tokens)
    shape = (1, 2, 8, 32) if packed else (2, 2, 8, 16)
    objects = [np.zeros(shape, np.uint32) for _ in range(2)]
    host = lmcache.describe(objects, heads=2)
    executor.submit(kvplan.compile(gpu, host).plan([2, 0, 1], [1, 0], dst_skip=1)).synchronize()
    for layer, kv, head, (block, chunk, first) in product(
        range(2), range(2), range(2), ((2, 1, 4), (0, 0, 0), (1, 0, 4))
    ):
        rows = slice(first, first + 4)
        if packed:
            moved = objects[chunk][0, layer, rows].reshape(4, 2, 2, 8)[:, head, kv]
        else:
            moved = objects[chunk][kv, layer, rows].reshape(4, 2, 8)[:, head]
        assert np.array_equal(moved, logical[layer, kv, block, :, head])
    assert not objects[1][:, :, :4].any()


TWO = np.zeros((2, 3, 8, 16), np.float16)
CASES = {
    "letters": ([TWO], {"engine_format": "NL_X_NB_QQ_HS_ZZ"}, "unknown letters 'QQ', 'ZZ'; expected some of NB, NL"),
    "empty": ([TWO], {"engine_format": ""}, "'' has unknown letters ''"),
    "nested planes": ([TWO], {"engine_format": "NP_ZZ"}, "has unknown letters 'NP', 'ZZ'"),
    "both": ([TWO], {"engine_format": "NL_X_NB_BS_HS", "heads": 2}, "object_format, heads and group are of memory"),
    "rank": ([TWO], {"engine_format": "NL_X_NB_BS_HS"}, "has 3 dims; the tensor's shape .* has 4"),
    "tokens": ([TWO[0]], {"engine_format": "NL_X_NBBS_NH_HS"}, "give sizes=.* for 'block' or 'token'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        lmcache.describe(given, **options)
