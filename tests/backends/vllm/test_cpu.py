"""vllm: what CPU_ATTN keeps inside a (block, head), by instruction set: literal addresses, and elements that move."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import flash_attention, vllm
from tests.backends.moves import move, noise

# 3 blocks, 2 heads, 32 tokens, 32 dims of 2 bytes: K and V of a (block, head) are 2,048 bytes each, a block 8,192.
CACHE = torch.zeros(3, 2, 32, 64, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No vLLM in this process, though another test may have loaded it."""
    for name in ("vllm", "vllm.v1.attention.backends.cpu_attn"):
        monkeypatch.delitem(sys.modules, name, raising=False)


# isa and version -> bytes from the beginning of K, and of V, to dim 0 of token 19; and to dims 1, 2, 4, 8 and 16 of it.
PLACES = {
    ("vec", None): ((38, (64, 128, 256, 512, 1024)), (1216, (2, 4, 8, 16, 32))),
    ("amx", None): ((1036, (2, 64, 128, 256, 512)), (578, (4, 8, 16, 32, 1024))),
    ("neon_bfmmla", "0.31.0"): ((1048, (2, 4, 64, 128, 256)), (262, (8, 16, 32, 512, 1024))),
    ("neon_bfmmla", "0.30.0"): ((1048, (2, 4, 64, 128, 256)), (70, (8, 128, 256, 512, 1024))),
}
for same in ("vec16", "neon_fmla", "rvv", "vxe", "vsx"):
    PLACES[same, None] = PLACES["vec", None]


def dims_of(layout, part):
    """Bytes from a row's first element, of 2 bytes, to each of its elements."""
    found = [0]
    for count, stride in layout.component(0, part).form.dim:
        found = [start + k * stride for start in found for k in range(count)]
    return found[::2]


@pytest.mark.parametrize(
    ("form", "isa", "version"),
    [("cpu", *told) for told in PLACES] + [("planes_hnd", *told) for told in PLACES if told[1] != "0.31.0"],
)
def test_where_a_token_lies(form, isa, version):
    cache = CACHE if form == "cpu" else torch.zeros(2, 3, 2, 32, 32, dtype=torch.bfloat16)
    layout = vllm.describe([cache], form=form, isa=isa, version=version)
    assert (layout.parts, layout.block_tokens, layout.heads, layout.block_nbytes) == (("k", "v"), 32, range(2), 8192)
    block, head, v = (8192, 4096, 2048) if form == "cpu" else (4096, 2048, 12_288)
    for part, start, (first, dims) in zip(("k", "v"), (0, v), PLACES[isa, version], strict=True):
        row = layout.address(layer=0, part=part, block=2, token=19, head=1)
        assert row == cache.data_ptr() + 2 * block + head + start + first
        assert tuple(dims_of(layout, part)[dim] for dim in (1, 2, 4, 8, 16)) == dims
        assert layout.address(layer=0, part=part) == cache.data_ptr() + start


def test_fp8_under_amx_has_the_same_groups():
    """K in pairs of dims of 16 tokens, V in pairs of tokens of 16 dims: bytes in the place of elements."""
    cache = torch.zeros(3, 2, 32, 64, dtype=torch.uint8)
    layout = vllm.describe([cache], form="cpu", isa="amx")
    assert layout.address(layer=0, part="k", token=19) == cache.data_ptr() + 16 * 32 + 3 * 2
    assert layout.address(layer=0, part="v", token=19) == cache.data_ptr() + 1024 + 9 * 32 + 1


def stored(isa, rows, kv, version=None):
    """Rows (blocks, heads, tokens, dims) as the kernels store K (0) or V (1) of them."""
    b, h, n, d = rows.shape
    if isa == "amx":
        shape, order = ((n // 16, 16, d // 2, 2), (0, 2, 1, 3)) if kv == 0 else ((n // 2, 2, d // 16, 16), (2, 0, 3, 1))
    elif isa == "neon_bfmmla":
        wide = 8 if version == "0.33.0" else 2
        shape, order = (
            ((n // 8, 8, d // 4, 4), (0, 2, 1, 3)) if kv == 0 else ((n // 4, 4, d // wide, wide), (2, 0, 3, 1))
        )
    else:
        shape, order = (n, d), ((1, 0) if kv == 0 else (0, 1))
    return rows.reshape(b, h, *shape).transpose(0, 1, *(2 + k for k in order)).reshape(b, h, n * d)


@pytest.mark.parametrize(
    ("isa", "version"), [("vec", None), ("amx", None), ("neon_bfmmla", "0.33.0"), ("neon_bfmmla", "0.26.0")]
)
def test_tokens_move_to_pages_of_another_size_and_back(isa, version):
    k, v = (noise((3, 2, 32, 64), seed).view(np.int16) for seed in (1, 2))
    content = np.concatenate([stored(isa, k, 0, version), stored(isa, v, 1, version)], axis=2)
    cache = np.ascontiguousarray(content).reshape(3, 2, 32, 64)
    packed = vllm.describe([cache], form="cpu", isa=isa, version=version)
    pages = np.zeros((2, 6, 16, 2, 32), np.int16)
    paged = flash_attention.describe([pages])
    move(packed, paged, [0, 1, 2], [0, 1, 2, 3, 4, 5])
    for plane, rows in zip(pages, (k, v), strict=True):
        assert np.array_equal(plane.reshape(3, 32, 2, 32).transpose(0, 2, 1, 3), rows)
    back = np.zeros_like(cache)
    move(paged, vllm.describe([back], form="cpu", isa=isa, version=version), [2, 3], [1])
    assert np.array_equal(back[1], cache[1])
    assert not back[[0, 2]].any()


def test_whole_blocks_of_one_packing_are_one_run():
    for isa in ("vec", "amx", None):
        one, two = (vllm.describe([np.zeros((3, 2, 32, 64), np.int16)], form="cpu", isa=isa) for _ in range(2))
        assert kvplan.compile(one, two).runs == 1


@pytest.mark.parametrize(("isa", "k"), [("vec", 38), ("amx", 1036), (None, None)])
def test_the_manager_s_blocks(isa, k):
    """Two kernel blocks of 32 tokens in one of the manager's: token 51 of block 0 is token 19 of kernel block 1."""
    cache = torch.zeros(4, 2, 32, 64, dtype=torch.bfloat16)
    layout = vllm.describe([cache], form="cpu", isa=isa, block_tokens=64)
    assert (layout.num_blocks, layout.block_nbytes) == (2, 16_384)
    assert layout.address(layer=0, part="v", block=1) == cache.data_ptr() + 16_384 + 2048
    if k is not None:
        assert layout.block_tokens == 64
        assert layout.address(layer=0, part="k", token=51, head=1) == cache.data_ptr() + 8192 + 4096 + k


@pytest.mark.parametrize("form", ["cpu", "planes_hnd"])
def test_an_unknown_instruction_set_is_opaque(form):
    cache = CACHE if form == "cpu" else torch.zeros(2, 3, 2, 32, 32, dtype=torch.bfloat16)
    for isa in (None, "neon"):  # of neon's two kernels for bfloat16, vLLM's name does not tell which
        layout = vllm.describe([cache], form=form, isa=isa)
        assert (layout.parts, layout.opaque, layout.block_tokens, layout.block_nbytes) == (("k", "v"), True, 1, 8192)
        head, v = (4096, 2048) if form == "cpu" else (2048, 12_288)
        assert layout.address(layer=0, part="v", head=1) == cache.data_ptr() + head + v
        with pytest.raises(LayoutError, match=r"token 1 of .* blocks are opaque and move whole"):
            layout.address(layer=0, part="k", token=1)
        known = vllm.describe([cache.clone()], form=form, isa="vec")
        with pytest.raises(kvplan.IncompatibleLayoutsError, match=r"opaque blocks move whole and tokens do not"):
            kvplan.compile(layout, known)
    half = torch.zeros(cache.shape, dtype=torch.float16)
    assert vllm.describe([half], form=form, isa="neon") == vllm.describe([half], form=form, isa="neon_fmla")


def test_opaque_blocks_move_whole():
    src, dst = noise((3, 2, 32, 128)).view(np.int16), np.zeros((3, 2, 32, 64), np.int16)
    move(*(vllm.describe([cache], form="cpu") for cache in (src, dst)), [2, 0], [0, 1])
    assert np.array_equal(dst[:2], src[[2, 0]])
    assert not dst[2].any()


@pytest.fixture
def loaded(monkeypatch):
    """A vLLM that this process has loaded: its choice of an instruction set, and what it was asked."""
    asked = []

    def load(isa, version="0.33.0"):
        module = SimpleNamespace(_get_attn_isa=lambda *given: asked.append(given) or isa)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", module)
        return asked

    return load


def test_vllm_tells_the_instruction_set_where_it_is_loaded(loaded):
    asked = loaded("amx")
    assert vllm.describe([CACHE], form="cpu") == vllm.describe([CACHE], form="cpu", isa="amx")
    assert asked == [(torch.bfloat16, 32, 32)]
    # of a cache of bytes the model's type is not known, and numpy's arrays are no engine's
    assert vllm.describe([CACHE.view(torch.uint8)], form="cpu").opaque
    assert vllm.describe([np.zeros((3, 2, 32, 64), np.int16)], form="cpu").opaque
    loaded("a later one")
    assert vllm.describe([CACHE], form="cpu").opaque


def test_vllm_tells_its_version_where_it_is_loaded(loaded):
    loaded("vec", "0.30.1")
    older = vllm.describe([CACHE], form="cpu", isa="neon_bfmmla")
    assert older == vllm.describe([CACHE], form="cpu", isa="neon_bfmmla", version="0.26.0")
    assert older != vllm.describe([CACHE], form="cpu", isa="neon_bfmmla", version="0.31.0")
    loaded("vec", "dev")
    with pytest.raises(LayoutError, match="isa='neon_bfmmla' needs version="):
        vllm.describe([CACHE], form="cpu", isa="neon_bfmmla")


REFUSED = {
    "unknown": (CACHE, {"isa": "avx"}, "isa is 'avx'; it is one of vec, vec16, amx, .* opaque and move whole"),
    "no text": (CACHE, {"isa": 5}, "isa is '5'; it is one of"),
    "long": (CACHE, {"isa": "x" * 9999}, "isa is 'x{40}'; it"),
    "another form": (CACHE, {"form": "fused", "isa": "vec"}, "isa is given for form='fused'; only 'cpu' and 'planes_"),
    "version": (CACHE, {"isa": "neon_bfmmla"}, "isa='neon_bfmmla' needs version=, of vLLM: V is packed in another way"),
    "no version": (CACHE, {"isa": "neon_bfmmla", "version": "new"}, "version is 'new'; give vLLM's as text, such as"),
    "a number": (CACHE, {"version": 0.31}, "version is '0.31'; give vLLM's as text"),
    "few tokens": (CACHE[:, :, :8], {"isa": "amx"}, "groups of 16 tokens and 2 dims; the cache has blocks of 8 token"),
    "few dims": (CACHE[..., :16].clone(), {"isa": "amx"}, "groups of 2 tokens and 16 dims; .* and heads of 8 dims"),
    "wide": (CACHE.float(), {"isa": "amx"}, "elements of 4 bytes; isa='amx' has 1 or 2"),
    "odd": (CACHE[..., :63].clone(), {"isa": "vec"}, "rows of 63 elements; they hold K and V, which are of one size"),
    "in NHD": (CACHE.transpose(1, 2), {"isa": "vec"}, r"strides \(4096, 2\) .*cpu caches are dense there, \(128, 2\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    cache, options, message = REFUSED[case]
    with pytest.raises(LayoutError, match=message) as raised:
        vllm.describe([cache], **{"form": "cpu"} | options)
    assert len(str(raised.value)) < 400
