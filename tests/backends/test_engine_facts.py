"""Groups of vLLM that share memory, and registrations of SGLang."""

from types import SimpleNamespace

import torch

import kvplan
from kvplan.backends import sglang, vllm


def test_groups_overlay_one_another():
    """A hybrid model: one allocation, two groups from byte 0, each with blocks of its own; their plans are joined."""
    raw = torch.arange(768, dtype=torch.int64).to(torch.int8)
    full, window = raw.reshape(3, 2, 2, 4, 16), raw.reshape(3, 2, 1, 8, 16)  # in the storage order BLHNC
    caches = {f"layers.{k}.attn": (window if k % 2 else full)[:, k // 2] for k in range(4)}
    full = vllm.describe(caches, names=["layers.0.attn", "layers.2.attn"])
    local = vllm.describe(caches, names=["layers.3.attn", "layers.1.attn"])
    assert (full.layers, full.block_tokens, local.layers, local.block_tokens) == ((0, 2), 4, (1, 3), 8)
    assert full.address(layer=2, part="k", block=1) == local.address(layer=3, part="k", block=1)
    again = raw.reshape(3, 2, 2, 4, 16)[:, 0]
    shared = vllm.describe(caches | {"layers.1.attn": again}, names=["layers.0.attn", "layers.1.attn"])
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
