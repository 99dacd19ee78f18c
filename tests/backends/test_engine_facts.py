"""What adapters ask of an engine in this process: vLLM's isa and version, SGLang's registrations; groups."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import sglang, vllm

CACHE = torch.zeros(3, 2, 32, 64, dtype=torch.bfloat16)
PLANES = torch.zeros(2, 3, 16, 2, 32, dtype=torch.float16)


@pytest.fixture
def loaded(monkeypatch):
    """A vLLM that this process has loaded: its choice of an instruction set, and what it was asked; none at first."""
    asked = []
    for name in ("vllm", "vllm.v1.attention.backends.cpu_attn"):
        monkeypatch.delitem(sys.modules, name, raising=False)

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
    loaded("vec", "0.27.1")
    assert vllm.describe([PLANES], form="rocm") == vllm.describe([PLANES], form="rocm", version="0.27.1")
    loaded("vec", "dev")
    with pytest.raises(LayoutError, match="isa='neon_bfmmla' needs version="):
        vllm.describe([CACHE], form="cpu", isa="neon_bfmmla")


@pytest.mark.parametrize("isa", [None, "neon"])
def test_an_unknown_instruction_set_is_opaque(loaded, isa):
    """Of neon's two kernels for bfloat16, vLLM's name does not tell which."""
    layout = vllm.describe([CACHE], form="cpu", isa=isa)
    assert (layout.opaque, layout.block_nbytes) == (True, 8_192)
    with pytest.raises(LayoutError, match=r"token 1 of .* blocks are opaque and move whole"):
        layout.address(layer=0, part="k", token=1)
    half = CACHE.to(torch.float16)
    assert vllm.describe([half], form="cpu", isa="neon") == vllm.describe([half], form="cpu", isa="neon_fmla")


SIZES = {"layers": 2, "blocks": 3, "heads": 2, "tokens": 4, "row_nbytes": 16, "order": "BLHNC"}


def test_groups_overlay_one_another():
    """A hybrid model: one allocation, two groups from byte 0, each with blocks of its own; their plans are joined."""
    raw = torch.arange(768, dtype=torch.int64).to(torch.int8)
    caches = dict(zip(("layers.0.attn", "layers.2.attn"), vllm.place(raw, **SIZES), strict=True))
    window = vllm.place(raw, **{**SIZES, "heads": 1, "tokens": 8})
    caches |= dict(zip(("layers.1.attn", "layers.3.attn"), window, strict=True))
    full = vllm.describe(caches, names=["layers.0.attn", "layers.2.attn"])
    local = vllm.describe(caches, names=["layers.3.attn", "layers.1.attn"])
    assert (full.layers, full.block_tokens, local.layers, local.block_tokens) == ((0, 2), 4, (1, 3), 8)
    assert full.address(layer=2, part="k", block=1) == local.address(layer=3, part="k", block=1)
    again = vllm.place(raw, **SIZES)
    shared = vllm.describe(caches | {"layers.1.attn": again[0]}, names=["layers.0.attn", "layers.1.attn"])
    assert shared.layers == (0,), "layer 1 lies at the address of layer 0"
    pools = [kvplan.allocate("block layer token head (kv dim)", like=group) for group in (full, local)]
    plans = [kvplan.compile(group, pool).plan([block], [0])
             for group, pool, block in zip((full, local), pools, (1, 2), strict=True)]  # fmt: skip
    assert kvplan.join(plans).nbytes == 512


def test_registrations_of_sglang_are_seams():
    """A large pool is registered in chunks of whole pages, noted on the tensor; no copy may span two."""
    buffer, other = (torch.zeros(2, 4, 3, 4, 4, 8, dtype=torch.float16) for _ in "ab")
    base = buffer.data_ptr()
    pool = SimpleNamespace(layout="page_first_direct", page_size=4, page_num=4, head_num=4, kv_buffer=buffer)
    buffer._sglang_cuda_host_registered_ranges = [(base, 2304), (base + 2304, 2304), (base + 4608, 1536)]
    described = sglang.describe(pool)
    assert described.seams == (base + 2304, base + 4608)
    same = sglang.describe(other, layout="page_first_direct", page_size=4)
    plan = kvplan.compile(described, same).plan(range(4), range(4))
    assert plan.descriptors().size.tolist() == [2304, 2304, 1536]
    assert sglang.describe(buffer, layout="page_first_direct", page_size=4).seams == described.seams
    buffer._sglang_cuda_host_registered_ranges = []
    assert sglang.describe(pool).seams == ()
