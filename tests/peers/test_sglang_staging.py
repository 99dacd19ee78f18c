"""SGLang 0.5.23: its own staging functions and kernels beside kvplan's steps, byte for byte, on the CPU.

The files come from the installed package, or from the folder that ``KVPLAN_SGLANG_FILES`` names: an unzipped wheel.
Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.gpu.staging.sglang_files import Ring, load
from kvplan.engines.sglang import plugin
from kvplan.engines.sglang.staging_hooks import SERVED
from kvplan.engines.sglang.staging_steps import StagingSteps

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

LAYERS, PAGES = 2, 6
# Ranks of prefill, of decode, and KV heads of the model.
PAIRS = [(1, 2, 4), (2, 1, 4), (4, 2, 8), (2, 4, 8), (8, 2, 4), (2, 8, 4), (4, 1, 4)]
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def root():
    return Path(os.environ.get("KVPLAN_SGLANG_FILES") or Path(find_spec("sglang").origin).parents[1])


@pytest.fixture(scope="module")
def files(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield load(root)


@pytest.fixture(scope="module")
def steps():
    made = StagingSteps()
    yield made
    made.close()


def pool(heads, page, dtype, seed, dim=16):
    """K and V by layer. Numbers, since torch on the CPU changes the bits of some NaN of bf16 when it gathers."""
    made = torch.Generator().manual_seed(seed)
    shape = PAGES * page, heads, dim
    return [[(100 * torch.rand(shape, generator=made)).to(dtype) for _ in range(LAYERS)] for _ in "kv"]


def raw(buffers):
    return [tensor.view(torch.uint8) for half in buffers for tensor in half]


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(("prefill", "decode", "heads"), PAIRS)
def test_either_end_may_be_kvplans(files, steps, monkeypatch, prefill, decode, heads, page, dtype, triton):
    """Every rank of prefill gathers and one of decode scatters: by SGLang, and by kvplan, with equal bytes."""
    monkeypatch.setattr(files.buffer, "_USE_TRITON_STAGING", triton)
    pages, others = np.array([5, 0, 3], dtype=np.int32), torch.tensor([1, 4, 2])
    mine, held = max(1, heads // prefill), max(1, heads // decode)
    for rank in range(decode):
        count, sizes, total = files.buffer.compute_staging_layout(
            prefill, decode, rank, heads, 3 * page, 16 * torch.empty(0, dtype=dtype).element_size(), LAYERS
        )
        region = torch.zeros(total, dtype=torch.uint8)
        for writer in range(count):
            name = writer if prefill > decode else rank * prefill // decode
            k, v = pool(mine, page, dtype, seed=name // max(1, prefill // heads))
            start, sent, _, _ = files.buffer.compute_head_slice_params(prefill, decode, name, rank, heads)
            rings = [Ring(torch.zeros(sizes[writer] + 64, dtype=torch.uint8)) for _ in range(2)]
            given = pages, start, sent, page
            made = [
                gather(k, v, given[0], ring, *given[1:])
                for gather, ring in zip((files.buffer.gather_all_layers_to_staging, steps.gather), rings, strict=True)
            ]
            assert made == [sizes[writer]] * 2
            assert torch.equal(rings[0].buffer, rings[1].buffer)
            region[sum(sizes[:writer]) :][: sizes[writer]] = rings[1].buffer[: sizes[writer]]
        ends = [pool(held, page, dtype, seed=9) for _ in range(2)]
        for scatter, (k, v) in zip((files.buffer.scatter_staging_to_kv, steps.scatter), ends, strict=True):
            scatter(region, k, v, others, page, prefill, decode, rank, heads)
        assert all(torch.equal(a, b) for a, b in zip(*map(raw, ends), strict=True))


@pytest.mark.parametrize("more", [0, 64])
def test_rows_of_latents_for_context_parallel_ranks(files, steps, more):
    widths = [576, 576, 132]
    planes = [torch.randint(0, 256, (9, width + more), dtype=torch.uint8) for width in widths]
    packs = [torch.zeros(5 * sum(widths), dtype=torch.uint8) for _ in range(2)]
    given = [plane.data_ptr() for plane in planes], torch.tensor([8, 0, 2, 5, 3])
    strides = [width + more for width in widths] if more else None
    for copy, pack in zip((files.rows.copy_mla_rows_into_pack, steps.rows), packs, strict=True):
        copy(*given, pack, widths, strides)
    assert torch.equal(*packs)


def test_packing_of_context_parallel_rows_calls_it(files, steps, monkeypatch):
    """SGLang's ``try_pack_dcp_src`` with kvplan's rows in place of its kernel."""
    planes = [torch.randint(0, 256, (9, 576), dtype=torch.uint8) for _ in range(3)]
    made = []
    for own in (files.rows.copy_mla_rows_into_pack, steps.rows):
        monkeypatch.setattr(files.pack, "copy_mla_rows_into_pack", own)
        ring = Ring(torch.zeros(4096 * 3, dtype=torch.uint8))
        addresses, rows = files.pack.try_pack_dcp_src(
            pack_buffer=ring, kv_data_ptrs=[plane.data_ptr() for plane in planes], token_item_lens=[576] * 3,
            src_token_indices=np.array([7, 1, 4]), pack_offset_bytes=64,
        )  # fmt: skip
        assert [address - ring.get_ptr() for address in addresses] == [64, 64 + 3 * 576, 64 + 6 * 576]
        assert rows.tolist() == [0, 1, 2]
        made.append(ring.buffer)
    assert torch.equal(*made)


@pytest.mark.parametrize("form", ["hnd", "narrow V", "rows of a page"])
def test_pools_that_sglang_reads_otherwise(files, steps, monkeypatch, form):
    """Its kernel assumes contiguous rows of tokens, and K's width for V; kvplan reads the strides."""
    monkeypatch.setattr(files.buffer, "_USE_TRITON_STAGING", True)
    k, v = pool(4, 4, torch.uint8, seed=0)
    if form == "hnd":
        k, v = ([tensor.view(PAGES, 4, 4, 16) for tensor in half] for half in (k, v))
        wanted = [tensor[3].transpose(0, 1) for tensor in (*k, *v)]
    elif form == "narrow V":
        v = [torch.cat([tensor.view(-1), tensor.view(-1)])[: PAGES * 4 * 4 * 12].view(-1, 4, 12) for tensor in v]
        wanted = [tensor[12:16] for tensor in (*k, *v)]
    else:
        k, v = ([torch.stack([tensor, 255 - tensor], 1)[:, 0] for tensor in half] for half in (k, v))
        wanted = [tensor[12:16] for tensor in (*k, *v)]
    theirs, mine = (Ring(torch.zeros(4096, dtype=torch.uint8)) for _ in range(2))
    for gather, ring in ((files.buffer.gather_all_layers_to_staging, theirs), (steps.gather, mine)):
        assert gather(k, v, np.array([3]), ring, 0, 4, 4) == 4 * 256
    held = [
        [torch.equal(ring.buffer[256 * n :][: one.numel()], one.reshape(-1)) for n, one in enumerate(wanted)]
        for ring in (mine, theirs)
    ]
    assert all(held[0])
    assert not all(held[1])


def found_as(monkeypatch, name, module):
    """Let a module be imported by a name, and be reached from its package."""
    package, _, last = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, module)
    if package:
        above = sys.modules.get(package) or ModuleType(package)
        monkeypatch.setattr(above, last, module, raising=False)
        found_as(monkeypatch, package, above)


def test_sglangs_own_hooks_put_kvplan_into_its_modules(root, files, steps, monkeypatch):
    """The plugin, SGLang's registry, and a name that another module has imported before."""
    spec = spec_from_file_location("sglang.srt.plugins.hook_registry", root / "sglang/srt/plugins/hook_registry.py")
    registry = module_from_spec(spec)
    found_as(monkeypatch, spec.name, registry)
    spec.loader.exec_module(registry)
    for served, module in zip(SERVED, (files.buffer, files.buffer, files.rows), strict=True):
        found_as(monkeypatch, served.module, module)
        monkeypatch.setattr(module, served.name, getattr(module, served.name))  # given back at the end
    monkeypatch.setattr(files.pack, "copy_mla_rows_into_pack", files.rows.copy_mla_rows_into_pack)
    own = files.rows.copy_mla_rows_into_pack
    monkeypatch.setenv("KVPLAN_SGLANG_STAGING", "auto")
    monkeypatch.delenv("KVPLAN_SGLANG", raising=False)
    plugin.plugin()
    registry.HookRegistry.apply_hooks()
    assert files.pack.copy_mla_rows_into_pack is files.rows.copy_mla_rows_into_pack is not own
    k, v = ([tensor.view(PAGES, 4, 4, 16) for tensor in half] for half in pool(4, 4, torch.uint8, seed=0))
    ring = Ring(torch.zeros(4096, dtype=torch.uint8))
    assert files.buffer.gather_all_layers_to_staging(k, v, np.array([3]), ring, 0, 4, 4) == 4 * 256
    assert torch.equal(ring.buffer[:256], k[0][3].transpose(0, 1).reshape(-1))  # which SGLang's kernel reads otherwise
