"""Every adapter, held against numpy's indexing of the same memory: one check for each row of the table."""

from itertools import product
from pkgutil import iter_modules

import numpy as np
import pytest

import kvplan
import kvplan.backends
from kvplan import KVLayout
from kvplan.backends import lmcache, quantized, sglang, vllm
from kvplan.layout.notation import parse
from tests.contract.adapters import attention_rows, engine_rows, quantized_rows, sglang_rows, vllm_rows
from tests.contract.adapters.rows import allocations, as_torch, mapped, noise

ROWS = [*attention_rows.ROWS, *engine_rows.ROWS, *quantized_rows.ROWS, *sglang_rows.ROWS, *vllm_rows.ROWS]


@pytest.mark.parametrize("convert", [np.asarray, as_torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_adapter(row, convert, executor):
    memory = mapped(convert, row.memory)
    layout = row.describe(memory)
    hold_facts(row, layout)
    hold_addresses(row, layout)
    hold_elements(row, layout, executor)
    for number, again in enumerate(row.same):
        assert again(memory) == layout, f"same[{number}]"


@pytest.mark.parametrize("adapter", engine_rows.SHAPES)
@pytest.mark.parametrize("model", engine_rows.PUBLISHED)
def test_a_block_of_each_rank_has_the_published_bytes(adapter, model):
    (dim, kind, published), (shape, describe) = engine_rows.PUBLISHED[model], engine_rows.SHAPES[adapter]
    for tp, nbytes in zip((1, 2, 4, 8), published, strict=True):
        layout = describe(noise(*shape(8 // tp, dim), kind=kind), 8 // tp)
        assert (layout.num_blocks, layout.block_tokens, len(layout.heads)) == (2, 16, 8 // tp)
        assert layout.block_nbytes == nbytes


def test_every_name_has_a_row():
    """Backends, LMCache's enum, row formats, vLLM's forms and SGLang's layouts; and no two rows have one name."""
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert tuple(engine_rows.FORMATS) == lmcache.ENGINE_FORMATS
    assert set(quantized_rows.NBYTES) == set(quantized.FORMATS)
    words = {word.strip(",") for name in names for word in name.split(" ")}
    assert words >= {*vllm.FORMS, *sglang.HOST["K and V"], "HND", "vectorized_5d", "unified"} - {"whole_blocks"}
    backends = {module.name for module in iter_modules(kvplan.backends.__path__) if module.name[0] != "_"}
    assert {name.split(":")[0] for name in names} == {*backends}


def hold_facts(row, layout):
    """Extents, bytes and notation are the row's; the notation parses back."""
    facts = layout.num_blocks, layout.block_tokens, layout.layers, " ".join(layout.parts), layout.heads
    assert facts == (row.blocks, row.tokens, row.layers, row.parts, row.heads)
    assert layout.nbytes == layout.block_nbytes * row.blocks
    assert row.nbytes in (None, layout.block_nbytes)
    assert layout.notation == row.notation
    assert str(layout).startswith(f"{row.notation} | ")
    for notation in layout.notation.split(" + "):
        assert str(parse(notation)) == notation


def pieces(layout):
    """Every component: numbers of its layer and part in the layout, and a layout of it alone."""
    for (l, layer), (p, part) in product(enumerate(layout.layers), enumerate(layout.parts)):
        if layer in layout.slice(parts=[part]).layers:
            yield l, p, layout.slice(layers=[layer], parts=[part])


def covering(extent):
    return sorted({0, min(1, extent - 1), extent // 2, extent - 1})


def hold_addresses(row, layout):
    """In every component, a covering set of rows begins where numpy finds its first element."""
    for l, p, piece in pieces(layout):
        extents = piece.num_blocks, piece.block_tokens, len(piece.heads)
        for b, t, h in product(*map(covering, extents)):
            address = layout.address(
                layer=piece.layers[0], part=piece.parts[0], block=b, token=t, head=piece.heads.start + h
            )
            elements = row.index(row.memory, l, p, b, t, h)
            assert address == elements.__array_interface__["data"][0], (l, p, b, t, h)


def hold_elements(row, layout, executor):
    """Two blocks arrive in a plain pool, each element in its place; loaded back, each byte of memory is as before."""
    pools, expected, views = [], [], []
    src = [layout.num_blocks - 1, 0][: layout.num_blocks]
    for l, p, piece in pieces(layout):
        tokens, heads = range(piece.block_tokens), range(len(piece.heads))
        rows = {
            (slot, t, h): row.index(row.memory, l, p, b, t, h)
            for (slot, b), t, h in product(enumerate(src), tokens, heads)
        }
        first = rows[0, 0, 0]
        shape = 2, len(tokens), len(heads), first.size
        notation = f"block {'subblock' if piece.opaque else 'token'} head dim"
        pools.append(
            KVLayout.from_tensors(
                notation,
                np.zeros(shape, first.dtype),
                part=piece.parts[0],
                layers=piece.layers,
                head_start=piece.heads.start,
            )
        )
        expected.append({place: elements.flatten() for place, elements in rows.items()})
        views += rows.values()
    assert layout.block_nbytes == sum(elements.nbytes for elements in views) // len(src)
    pool = KVLayout.merge(pools)
    slots = list(range(len(src)))
    executor.submit(kvplan.compile(layout, pool).plan(src, slots)).result()
    for part, values in zip(pools, expected, strict=True):
        for place, elements in values.items():
            assert np.array_equal(part.tensors[place], elements), (str(part), place)
    before = [memory.copy() for memory in allocations(row.memory)]
    for view in views:
        view[...] = 0
    executor.submit(kvplan.compile(pool, layout).plan(slots, src)).result()
    for memory, content in zip(allocations(row.memory), before, strict=True):
        assert np.array_equal(memory, content)
