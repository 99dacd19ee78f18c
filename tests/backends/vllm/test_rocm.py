"""vllm: ROCM_ATTN by version, and the shuffled cache of ROCM_AITER_FA: every element of every row."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvplan import LayoutError
from kvplan.backends import vllm

HEADS, DIM, TOKENS = 2, 32, 16
PLANES = torch.zeros(2, 3, TOKENS, HEADS, DIM, dtype=torch.float16)  # planes of 6,144 bytes, pages of 2,048


def test_where_a_token_lies():
    """K (H, D / 8, N, 8): token 5 of head 1 begins 1,024 + 5 * 16 bytes after its page; V (H, D, N): 1,024 + 5 * 2."""
    layout = vllm.describe([PLANES], form="rocm", version="0.26.0")
    assert (layout.parts, layout.heads, layout.block_tokens, layout.block_nbytes) == (("k", "v"), range(2), 16, 4096)
    where = {"layer": 0, "block": 2, "token": 5, "head": 1}
    assert layout.address(part="k", **where) == PLANES.data_ptr() + 2 * 2048 + 1024 + 80
    assert layout.address(part="v", **where) == PLANES.data_ptr() + 6144 + 2 * 2048 + 1024 + 10
    assert layout.component(0, "k").form.dim == ((4, 256), (16, 1))  # groups of 8 dims, 256 bytes apart
    assert layout.component(0, "v").form.dim == ((32, 32), (2, 1))
    rows = vllm.describe([PLANES], form="planes")
    assert layout.address(part="k", **where) != rows.address(part="k", **where)


@pytest.mark.parametrize("form", ["rocm", "shuffled_planes"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_every_element(form, dtype):
    """As PagedAttention.split_kv_cache views the planes; shuffled, V is (H, N / x, D, x)."""
    x = 16 // dtype.itemsize
    cache = torch.zeros(2, 3, TOKENS, HEADS, DIM, dtype=dtype)
    layout = vllm.describe([cache], form=form, **({"version": "0.20.2"} if form == "rocm" else {}))
    keys = cache[0].view(3, HEADS, DIM // x, -1, x)
    values = cache[1].view(3, HEADS, DIM, -1) if form == "rocm" else cache[1].view(3, HEADS, TOKENS // x, DIM, x)
    for part in ("k", "v"):
        starts = [0]
        for count, stride in layout.component(0, part).form.dim:
            starts = [start + k * stride for start in starts for k in range(count)]
        for b, h, t in np.ndindex(3, HEADS, TOKENS):
            row = layout.address(layer=0, part=part, block=b, token=t, head=h)
            for d, start in enumerate(starts[:: dtype.itemsize]):
                if part == "k":
                    element = keys[b, h, d // x, t, d % x]
                else:
                    element = values[b, h, d, t] if form == "rocm" else values[b, h, t // x, d, t % x]
                assert row + start == element.data_ptr()


def test_later_versions_have_two_head_slots():
    slots = torch.zeros(3, 2, TOKENS, HEADS * DIM, dtype=torch.float16)
    paged = vllm.describe([slots], form="paged", heads=2)
    assert vllm.describe([slots], form="rocm", version="0.29.0", heads=2) == paged
    assert vllm.describe([slots], form="rocm", version="0.33.0", heads=2) == paged
    with pytest.raises(LayoutError, match=r"form='rocm' is \(2, B, N, H, D\)"):
        vllm.describe([slots], form="rocm", version="0.28.1")
    with pytest.raises(LayoutError, match=r"5 dims; form='paged' is \(B, 2, N, H \* D\)"):
        vllm.describe([PLANES], form="rocm", version="0.33.0", heads=2)


def test_kernel_blocks():
    """Token 21 of the manager's block 0 is token 5 of kernel block 1."""
    cache = torch.zeros(2, 4, TOKENS, HEADS, DIM, dtype=torch.float16)
    layout = vllm.describe([cache], form="rocm", version="0.28.0", block_tokens=32)
    assert (layout.num_blocks, layout.block_tokens) == (2, 32)
    assert layout.address(layer=0, part="k", token=21, head=1) == cache.data_ptr() + 2048 + 1024 + 80


def test_the_version_of_the_vllm_that_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.27.1"))
    assert vllm.describe([PLANES], form="rocm") == vllm.describe([PLANES], form="rocm", version="0.27.1")
    monkeypatch.delitem(sys.modules, "vllm")
    with pytest.raises(LayoutError, match=r"form='rocm' needs version=.* to 0.28 .* \(2, B, N, H, D\), from 0.29"):
        vllm.describe([PLANES], form="rocm")


REFUSED = {
    "version": (PLANES, {"form": "rocm", "version": "old"}, "version is 'old'; give vLLM's as text, such as '0.26.0'"),
    "rows": (
        PLANES,
        {"form": "planes", "version": "0.26.0"},
        "version is given for form='planes'; only 'rocm' .ROCM_A",
    ),
    "heads": (PLANES, {"form": "rocm", "version": "0.26.0", "heads": 2}, "form='rocm' takes no heads="),
    "hnd": (
        PLANES.transpose(2, 3),
        {"form": "rocm", "version": "0.26.0"},
        "the last 3 dims, .* x-packed caches are de",
    ),
    "few": (
        PLANES[:, :, :4].clone(),
        {"form": "shuffled_planes"},
        "form='shuffled_planes' has blocks of 4 token slots",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    cache, options, message = REFUSED[case]
    with pytest.raises(LayoutError, match=message):
        vllm.describe([cache], **options)
