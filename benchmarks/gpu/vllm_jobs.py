"""The jobs of vLLM's CPU offloading that are compared, and the limits of kvplan's worker. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.gpu.sizes import KIB

MOST_NBYTES = 1_400_000_000  # of a job
# Between two questions after a job of more bytes, some 60 us are left to other threads; of fewer, nothing.
SPUN_NBYTES = 32 << 20

# How many times vLLM's GB/s.
SMALL_PAGE, SMALL_PAGE_LOADS = 8 * KIB, {"": 1.3, "decode": 2.0}  # up to this page; alone and beside decode
STORES = {4 * KIB: 5.0, 8 * KIB: 2.7, 16 * KIB: 1.9}  # alone, by page
LARGE_PAGE, LARGE_PAGES = 64 * KIB, 1.2  # from this page on: both ways, alone

CPU_MS, CPU_SHARE = 0.1, 0.03  # of a job
SMALL_JOB, SMALL_JOB_MS = (8 * KIB, 80, 16), 0.26  # page, layers, blocks


class Model(NamedTuple):
    """A KV cache as vLLM 0.33 makes it canonical: of each layer a tensor of pages, which hold K and V of a block.

    Attributes:
        name: of the model and its tensor parallelism.
        layers: pages of a block.
        page_nbytes: bytes of a page.
        blocks: of the jobs that are measured alone.
        beside: of those that are measured beside compute.
    """

    name: str
    layers: int
    page_nbytes: int
    blocks: tuple[int, ...]
    beside: tuple[int, ...]

    def nbytes(self, blocks: int) -> int:
        """Bytes of a job of a number of blocks."""
        return blocks * self.layers * self.page_nbytes


# Blocks of 16 tokens, of 64 with DeepSeek (FlashMLA's); bf16.
MODELS = (
    Model("gpt-oss-120B TP 8", 36, 4 * KIB, (16, 128, 512, 2048, 4096), (2048,)),
    Model("Llama-70B TP 8", 80, 8 * KIB, (16, 64, 256, 1024, 2048), (16, 1024)),
    Model("Llama-70B TP 4", 80, 16 * KIB, (16, 64, 256, 1024), (1024,)),
    Model("Llama-8B", 32, 64 * KIB, (16, 64, 256, 512), (512,)),
    Model("DeepSeek MLA", 61, 72 * KIB, (16, 64, 256), (256,)),
)


@dataclass(frozen=True)
class JobScale:
    """How large a run is.

    Attributes:
        models: the caches.
        repeats: jobs of each kind and worker; those of few bytes.
        large_repeats: the same of others.
        rounds: windows of each case beside a kind of compute.
    """

    models: tuple[Model, ...]
    repeats: int
    large_repeats: int
    rounds: dict[str, int]


JOBS = JobScale(MODELS, 31, 7, {"decode": 3, "prefill": 1})
SMOKE_JOBS = JobScale(
    tuple(model._replace(layers=4, blocks=(4, 16), beside=(16,)) for model in MODELS[1:4]), 3, 3,
    {"decode": 1, "prefill": 1},
)  # fmt: skip


def times_vllm(direction: str, page_nbytes: int, compute: str = "") -> float | None:
    """How many times vLLM's speed a job must reach; None where nothing is asked.

    Args:
        direction: ``"load"`` or ``"store"``.
        page_nbytes: bytes of a page.
        compute: what runs beside it.

    >>> times_vllm("load", 4096), times_vllm("load", 8192, "decode"), times_vllm("load", 8192, "prefill")
    (1.3, 2.0, None)
    >>> [times_vllm("store", page) for page in (4096, 8192, 16384, 65536)], times_vllm("load", 16384)
    ([5.0, 2.7, 1.9, 1.2], None)
    """
    if not compute and page_nbytes >= LARGE_PAGE:
        return LARGE_PAGES
    if direction == "load":
        return SMALL_PAGE_LOADS.get(compute) if page_nbytes <= SMALL_PAGE else None
    return None if compute else STORES.get(page_nbytes)


def cpu_ms(seconds: float) -> float:
    """Milliseconds of CPU time that a job may cost that takes ``seconds``.

    >>> round(cpu_ms(0.010), 6)
    0.4
    """
    return CPU_MS + CPU_SHARE * seconds * 1e3


def job_ms(model: Model, blocks: int) -> float | None:
    """Milliseconds that a job may take in all, where that is asked for."""
    return SMALL_JOB_MS if (model.page_nbytes, model.layers, blocks) == SMALL_JOB else None
