"""Rows of flash_attention, flashinfer, cross_layer, mla and state."""

from itertools import permutations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvplan import KVLayout
from kvplan.backends import cross_layer, flash_attention, flashinfer, mla, state
from tests.contract.adapters.rows import Row, named, noise, per_layer

PLANES, PAIR = "layer: kv block token head dim", "layer kv: block token head dim"
NHD, HND = "layer: block kv token head dim", "layer: block kv head token dim"


def pairs(*shape):
    return [(noise(*shape), noise(*shape)) for _ in "01"]


FLASH = [
    Row("planes", per_layer(2, 3, 4, 2, 8), flash_attention.describe, "l p b t h", PLANES,
        same=(lambda m: flash_attention.describe(tuple(m)),
            lambda m: flash_attention.describe([(k, v) for k, v in m]))),
    Row("pair", pairs(3, 4, 2, 8), flash_attention.describe, "l p b t h", PAIR),
    Row("one layer", noise(2, 3, 4, 2, 8), flash_attention.describe, "p b t h", PLANES,
        same=(lambda m: flash_attention.describe([m]),)),
    Row("two blocks", noise(2, 2, 4, 2, 8), flash_attention.describe, "p b t h", PLANES, blocks=2),
    Row("two layers of two of all", per_layer(2, 2, 2, 2, 8), flash_attention.describe, "l p b t h", PLANES, blocks=2,
        tokens=2),
    Row("HND strides", per_layer(2, 3, 2, 4, 8), lambda m: flash_attention.describe([x.swapaxes(2, 3) for x in m]),
        "l p b h t", PLANES),
    Row("blocks-first storage", per_layer(3, 2, 4, 2, 8),
        lambda m: flash_attention.describe([x.swapaxes(0, 1) for x in m]), "l b p t h", PLANES,
        same=(flashinfer.describe,)),
    Row("padded heads", per_layer(2, 3, 4, 2, 24, kind=np.uint8),
        lambda m: flash_attention.describe([x[..., :16] for x in m]), "l p b t h :16", PLANES),
    Row("numbers", per_layer(2, 3, 4, 2, 8), lambda m: flash_attention.describe(m, layer_start=40, head_start=6),
        "l p b t h", PLANES, layers=(40, 41), heads=range(6, 8)),
    Row("layers", pairs(3, 4, 2, 8), lambda m: flash_attention.describe(m, layers=[3, 7]), "l p b t h", PAIR,
        layers=(3, 7)),
]  # fmt: skip

INFER = [
    Row("NHD", per_layer(3, 2, 4, 2, 8), flashinfer.describe, "l b p t h", NHD),
    Row("HND", per_layer(3, 2, 2, 4, 8), lambda m: flashinfer.describe(m, kv_layout="HND"), "l b p h t", HND,
        same=(lambda m: flashinfer.describe([x.swapaxes(2, 3) for x in m]),)),
    Row("pair NHD", pairs(3, 4, 2, 8), flashinfer.describe, "l p b t h", PAIR),
    Row("pair HND", pairs(3, 2, 4, 8), lambda m: flashinfer.describe([list(x) for x in m], kv_layout="HND"),
        "l p b h t", "layer kv: block head token dim"),
    Row("as many tokens as heads, NHD", noise(3, 2, 4, 4, 8), flashinfer.describe, "b p t h", NHD, heads=range(4)),
    Row("as many tokens as heads, HND", noise(3, 2, 4, 4, 8), lambda m: flashinfer.describe(m, kv_layout="HND"),
        "b p h t", HND, heads=range(4)),
    Row("all K, all V", [per_layer(3, 4, 2, 8), per_layer(3, 4, 2, 8)],
        lambda m: flashinfer.describe(list(zip(*m, strict=True))), "p l b t h", PAIR,
        same=(lambda m: KVLayout.from_tensors("kv layer: block token head dim", m),)),
    Row("padded pages", noise(3, 320, kind=np.uint8),
        lambda m: flashinfer.describe([m[:, :256].reshape(3, 2, 4, 2, 16)], layer_start=7, head_start=2),
        "b 128p+32t+16h:16", NHD, layers=(7,), heads=range(2, 4)),
    Row("layers", per_layer(3, 2, 4, 2, 8), lambda m: flashinfer.describe(m, layers=[3, 7]), "l b p t h", NHD,
        layers=(3, 7)),
    Row("NVFP4", [per_layer(3, 2, 16, 8, 64, kind=np.uint8), per_layer(3, 2, 16, 8, 8, kind=np.uint8)],
        lambda m: KVLayout.merge([flashinfer.describe(m[0]), flashinfer.describe(m[1], part="scale")]),
        "0 l b 0 t h | 0 l b 1 t h | 1 l b 0 t h | 1 l b 1 t h", NHD, tokens=16, heads=range(8),
        parts="k v k_scale v_scale"),
]  # fmt: skip

SIZES = {"block": 3, "layer": 2, "kv": 2, "token": 4, "head": 2, "dim": 8}


def permuted(order):
    """A pool of all layers in one order, one row for each."""
    notation = " ".join((*order, "dim"))

    index = " ".join(axis[0] if axis != "kv" else "p" for axis in order)
    return Row(notation, noise(*(SIZES[axis] for axis in order), 8),
               lambda m: cross_layer.describe(m, notation, layer_start=4, head_start=2), index, notation,
               layers=(4, 5), heads=range(2, 4))  # fmt: skip


CROSS = [
    *map(permuted, list(permutations(("block", "layer", "kv", "token", "head")))[::5]),
    Row("default", noise(3, 2, 2, 4, 2, 8), cross_layer.describe, "b l p t h", "block layer kv token head dim"),
    Row("HND storage", noise(3, 2, 2, 2, 4, 8), lambda m: cross_layer.describe(m.swapaxes(3, 4)), "b l p h t",
        "block layer kv token head dim", same=(lambda m: cross_layer.describe(m, "block layer kv head token dim"),)),
    Row("vLLM's BLHNC", noise(3, 2, 2, 4, 16), lambda m: cross_layer.describe(m, "block layer head token (kv dim)"),
        "b l h t 8p:8", "block layer head token (kv dim)"),
    Row("padded blocks", noise(3, 300, kind=np.uint8), lambda m: cross_layer.describe(m[:, :256].reshape(3, 2, 128),
            "block layer (token dim)", sizes={"token": 4}, layers=[1, 5], part="latent"), "b 128l+32t:32",
        "block layer (token dim)", layers=(1, 5), parts="latent"),
]  # fmt: skip

LATENT = {"parts": "kv", "heads": range(1)}

MLA = [
    Row("three dims", per_layer(3, 4, 576), lambda m: mla.describe(m, layer_start=30), "l b t",
        "layer: block token dim", layers=(30, 31)),
    Row("one before tokens", per_layer(3, 1, 4, 576), mla.describe, "l b 0 t", "layer: block 1 token dim",
        same=(lambda m: mla.describe([x[:, 0] for x in m]),)),
    Row("one after tokens", per_layer(3, 4, 1, 576), mla.describe, "l b t 0", "layer: block token 1 dim",
        same=(lambda m: mla.describe([x[:, :, 0] for x in m]),)),
    Row("flat slots", per_layer(12, 576, kind=np.uint8), lambda m: mla.describe(m, block_tokens=4), "l 4b+t",
        "layer: (block token) dim"),
    Row("flat slots with a one", per_layer(12, 1, 576, kind=np.uint8), lambda m: mla.describe(m, block_tokens=4),
        "l 4b+t 0", "layer: (block token) 1 dim"),
    Row("pages of one token", noise(12, 1, 16), mla.describe, "b 0", "layer: block token dim", blocks=12, tokens=1,
        same=(lambda m: mla.describe(m, block_tokens=1),)),
    *(Row(f"64 tokens of {row} bytes", noise(2, 64, row // size, kind=kind), mla.describe, "b t",
        "layer: block token dim", blocks=2, tokens=64) for row, size, kind in ((1152, 2, np.int16), (576, 1, np.int8),
        (656, 1, np.uint8), (352, 1, np.uint8), (528, 1, np.uint8), (584, 1, np.uint8))),
    Row("padded rows and blocks", noise(3, 70, 672, kind=np.uint8), lambda m: mla.describe([m[:, :64, :656]]),
        "b t :656", "layer: block token dim", tokens=64, same=(lambda m: mla.describe([m[:, :64]], row_nbytes=656),)),
    Row("padded rows of elements", noise(3, 4, 640), lambda m: mla.describe(m, row_nbytes=1152), "b t :576",
        "layer: block token dim"),
    Row("ckv and kpe", [per_layer(3, 4, 512), per_layer(3, 4, 64)],
        lambda m: mla.describe(m[0], kpe=m[1], layers=[2, 9]), "p l b t", "layer: block token dim", layers=(2, 9),
        parts="ckv kpe", same=(lambda m: mla.describe(m[0], kpe=m[1], layers=[2, 9], part="kv", seams=()),)),
    Row("ckv and kpe in one latent", noise(3, 4, 576), lambda m: mla.describe(m[..., :512], kpe=m[..., 512:]),
        "b t :512 | b t 512:64", "layer: block token dim", parts="ckv kpe"),
    Row("ckv and kpe of flat slots", [noise(12, 1, 512), noise(12, 1, 64)],
        lambda m: mla.describe(m[0], kpe=m[1], block_tokens=4, layer_start=6), "p 4b+t 0", "layer: (block token) 1 dim",
        layers=(6,), parts="ckv kpe"),
    Row("DeepSeek-V4's pages, whole", noise(3, 37_440, kind=np.uint8),
        lambda m: mla.describe([m[:, :37_376].reshape(3, 64, 584)], whole_blocks=True), "b :37376",
        "layer: block dim.0 dim.1", same=(lambda m: mla.describe([m], whole_blocks=True, row_nbytes=37_376),
            lambda m: mla.describe([m[:, :37_376].reshape(3, 1, 64, 584)], whole_blocks=True),
            lambda m: mla.describe([m[:, :37_376].reshape(3, 64, 1, 584)], whole_blocks=True))),
    Row("whole flat slots", noise(12, 1, 132, kind=np.uint8),
        lambda m: mla.describe(m, whole_blocks=True, block_tokens=4), lambda m, l, p, b, t, h: m[4 * b :][:4, 0],
        "layer: (block dim.0) 1 dim.1", layers=(0,),
        same=(lambda m: mla.describe(m.reshape(3, 528), whole_blocks=True),)),
    Row("a latent and its indexer", [noise(3, 64, 656, kind=np.uint8), noise(3, 8_448, kind=np.uint8)],
        lambda m: KVLayout.merge([mla.describe(m[0]), mla.describe(m[1], part="index", whole_blocks=True)]),
        "0 b t | 1 b", "layer: block token dim + layer: block dim", tokens=64, parts="kv index"),
]  # fmt: skip


def mamba_states(pages):
    """A small Mamba-2 in pages of vLLM: 3 x 512 of 2 bytes, 4 x 16 x 32 of 4, and 768 bytes of pad."""
    return pages[:, :3072].reshape(3, 3, 1024), pages[:, 3072:11_264].reshape(3, 4, 16, 128)


STATE = [
    Row("states of padded pages", per_layer(3, 12_032, kind=np.uint8),
        lambda m: state.describe([mamba_states(x) for x in m], layers=[1, 7]), "l b :3072 | l b 3072:8192",
        "layer: block dim.0 dim.1 + layer: block dim.0 dim.1 dim.2", layers=(1, 7), parts="conv ssm"),
    Row("one padded page a layer", noise(3, 1, 1, 640, kind=np.uint8), lambda m: state.describe([m[..., :600]]),
        "b 0 0 :600", "layer: block dim.0 dim.1 dim.2", parts="state",
        same=(lambda m: state.describe(m[:, 0, 0, :600]),)),
    Row("dims of one, with any stride", as_strided(noise(3, 48, kind=np.uint8), (3, 1, 24, 1), (48, 7, 1, 5)),
        state.describe, "b", "layer: block dim.0 dim.1 dim.2", parts="state"),
    Row("one element a slot", noise(3, 1, kind=np.int32), state.describe, "b", "layer: block dim", parts="state"),
    Row("a named part", noise(3, 640, kind=np.uint8), lambda m: state.describe(m, parts=["conv"], layer_start=3), "b",
        "layer: block dim", layers=(3,), parts="conv"),
    Row("a pool of all layers", [noise(2, 3, 256, 3), noise(2, 3, 2, 8, 8, kind=np.int32)],
        lambda m: state.describe(list(zip(*m, strict=True))), "p l b",
        "layer: block dim.0 dim.1 + layer: block dim.0 dim.1 dim.2", parts="conv ssm"),
    Row("kinds of Kimi's", [[*(noise(3, 3, dim) for dim in (8, 16, 32)), noise(3, 2, 8, 8, kind=np.int32)]],
        lambda m: state.describe(m, parts=("conv_q", "conv_k", "conv_v", "ssm")), "0 p b",
        "layer: block dim.0 dim.1 + layer: block dim.0 dim.1 dim.2", parts="conv_q conv_k conv_v ssm"),
    Row("beside attention", [noise(3, 16, 64), noise(3, 640, kind=np.uint8)],
        lambda m: KVLayout.merge([mla.describe(m[0]), state.describe(m[1], layer_start=1)]), "0 b t | 1 b",
        "layer: block token dim + layer: block dim", layers=(0, 1), tokens=16, parts="kv state"),
]  # fmt: skip

ROWS = named({"flash_attention": FLASH, "flashinfer": INFER, "cross_layer": CROSS, "mla": MLA, "state": STATE})
