"""What adapters keep for the compiler: seams, parts and opaque blocks that only go to their like, words of rows."""

import numpy as np
import pytest

import kvplan
from kvplan import IncompatibleLayoutsError, KVLayout
from kvplan.backends import (
    cross_layer,
    flash_attention,
    flashinfer,
    flexkv,
    lmcache,
    mla,
    quantized,
    sglang,
    state,
    tensorrt_llm,
    vllm,
)


def zeros(*shape):
    return np.zeros(shape, np.uint8)


PLANES, PAGES, POOL, ROWS = zeros(2, 3, 4, 2, 8), zeros(3, 2, 4, 2, 8), zeros(3, 2, 2, 4, 2, 8), zeros(3, 4, 8)
SEAMS = {
    "cross_layer": (POOL, cross_layer.describe),
    "flash_attention": (PLANES, flash_attention.describe),
    "flashinfer": (PAGES, flashinfer.describe),
    "flexkv": (POOL, lambda pool, seams: flexkv.describe(pool, "BLOCKFIRST", seams=seams)),
    "lmcache": (POOL, lmcache.describe),
    "mla": (ROWS, mla.describe),
    "quantized": (zeros(3, 8_448), lambda m, seams: quantized.describe(m, "indexer_fp8", block_tokens=64, seams=seams)),
    "sglang": (zeros(2, 12, 2, 4, 8),
               lambda m, seams: sglang.describe(m, layout="page_first", page_size=4, seams=seams)),
    "state": (ROWS, state.describe),
    "tensorrt_llm": (zeros(3, 2, 2, 2, 4, 8), tensorrt_llm.describe),
    "tensorrt_llm slots": (zeros(3, 96), tensorrt_llm.describe),
    "vllm": (zeros(3, 2, 4, 16), vllm.describe),
}  # fmt: skip


@pytest.mark.parametrize("name", SEAMS)
def test_seams_are_kept(name):
    memory, describe = SEAMS[name]
    seam = memory[1].ctypes.data
    assert describe(memory, seams=[seam]).seams == (seam,)


def kv_with_scales(tokens, blocks):
    cache = flashinfer.describe(zeros(blocks, 2, tokens, 8, 64))
    return quantized.with_scales(cache, {"k_scale": zeros(blocks, tokens * 64)}, whole_blocks=True)


SLOT = state.describe(zeros(4, 640))
V41 = quantized.describe(zeros(2, 64, 528), "deepseek_v41")
CPU = zeros(3, 2, 32, 64).view(np.int16)
APART = {
    "pages of mla, as tokens": (mla.describe(zeros(3, 64, 584), whole_blocks=True), mla.describe(zeros(3, 64, 584))),
    "pages of mla, smaller": (mla.describe(zeros(3, 64, 584), whole_blocks=True),
                              mla.describe(zeros(6, 32, 584), whole_blocks=True)),
    "pages, as an indexer's rows": (KVLayout.from_tensors("block dim", zeros(2, 8_448)),
                                    quantized.describe(zeros(2, 8_448), "indexer_fp8", block_tokens=64)),
    "scales behind each row, and behind the page": (V41, quantized.describe(zeros(2, 64, 528), "deepseek_v41_split")),
    "rows of another format": (quantized.describe(zeros(2, 64, 584), "int8_per_token_head_mla"), V41),
    "swizzled scales of larger blocks": (kv_with_scales(16, 4), kv_with_scales(32, 2)),
    "states of half a slot": (SLOT, state.describe(zeros(8, 320))),
    "a state, as tokens": (SLOT, KVLayout.from_tensors("block token dim", zeros(4, 16, 40), part="state")),
    "tokens, as a state": (KVLayout.from_tensors("block token dim", zeros(4, 16, 40), part="state"), SLOT),
    "a state of another name": (SLOT, state.describe(zeros(4, 640), parts=["conv"])),
    "an indexer's pool of larger blocks": tuple(
        tensorrt_llm.describe(zeros(n, 3, 1, 16 * 132), part="index", whole_blocks=True).slice(layers=[0])
        if n == 4 else tensorrt_llm.describe(zeros(n, 1, 1, 32 * 132), part="index", whole_blocks=True)
        for n in (4, 2)),
    "slots of half the size": (tensorrt_llm.describe(zeros(3, 4_096)), tensorrt_llm.describe(zeros(6, 2_048))),
    "vLLM's packed blocks, known and not": (vllm.describe([CPU], form="cpu"),
                                            vllm.describe([CPU.copy()], form="cpu", isa="vec")),
    "NVFP4 by page and by row": (vllm.describe(zeros(3, 4, 4, 72), form="whole_blocks"),
                                 quantized.describe(zeros(3, 1_152), "nvfp4", block_tokens=4, num_kv_heads=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_these_do_not_mix(name):
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(*APART[name])


# Bytes of the parts of a row (of one head), and the word that such rows, one after the other, leave to a kernel.
WORDS = {
    "fp8_ds_mla": ((656,), 16), "nvfp4_ds_mla": ((352,), 32), "deepseek_v41": ((528,), 16),
    "deepseek_v41_nvfp4": ((288,), 32), "int8_per_token_head_mla": ((584,), 8), "int4_per_token_head_mla": ((296,), 8),
    "deepseek_v4": ((576, 8), 8), "indexer_fp8": ((128, 4), 4), "indexer_mxfp4": ((64, 4), 4),
    "int8_per_token_head": ((264,), 8), "int4_per_token_head": ((136,), 8), "turboquant_k8v4": ((196,), 4),
    "turboquant_4bit_nc": ((134,), 2), "turboquant_k3v4_nc": ((118,), 2), "turboquant_3bit_nc": ((102,), 2),
}  # fmt: skip


def aligned(*shape):
    """Zeros that begin at a multiple of 64."""
    flat = zeros(int(np.prod(shape)) + 63)
    return flat[-flat.ctypes.data % 64 :][: int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize("name", WORDS)
def test_words_of_rows_on_their_way_to_a_page_first_host(name):
    """Rows of two layers inside a token: one run a row and layer."""
    (row, alignment), form = WORDS[name], quantized.FORMATS[name]
    heads, told = (3, {"num_kv_heads": 3}) if form.headed else (1, {})
    page = -(-16 * heads * sum(row) // form.align) * form.align
    src = quantized.describe([aligned(4, page) for _ in "01"], name, block_tokens=16, **told)
    rows = {part: heads * nbytes for part, nbytes in zip(src.parts, row, strict=True)}
    order, sizes = ("(head dim)", {"token": 32, "head": 3}) if form.headed else ("dim", {"token": 32})
    dst = [KVLayout.from_tensors(f"(block token) layer {order}", aligned(96, 2, nbytes), sizes=sizes, part=part)
           for part, nbytes in rows.items()]  # fmt: skip
    program = kvplan.compile(src, KVLayout.merge(dst))
    assert (program.alignment, program.unit_tokens) == (alignment, 16)
    assert program.run_nbytes == (min(rows.values()), max(rows.values()))


def test_bits_of_an_odd_head_dim_are_rounded_to_an_even_row():
    sizes = {("turboquant_k3v4_nc", 20): 24, ("turboquant_k3v4_nc", 18): 22, ("turboquant_k8v4", 17): 30,
             ("turboquant_k8v4", 15): 28}  # fmt: skip
    assert {(name, dim): quantized.FORMATS[name].nbytes(dim) for name, dim in sizes} == sizes
