"""One model's cache and host rows with two workers over them, and the set-up of all models of a run."""

from __future__ import annotations

import time
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import vllm_peer
from benchmarks.gpu.vllm_jobs import JobScale, Model
from benchmarks.gpu.vllm_peer import BatchWorker, Specs, Vllm, by_memmove, specs_of
from benchmarks.gpu.vllm_rows import OURS, Peer, packed
from kvplan.engines.vllm.worker import Worker
from kvplan.measure.workload import DIRECTIONS

DIFFERENT = 8  # jobs of other blocks, taken in turn
PATIENCE = 60.0  # seconds for a job
NO_LINK = float("inf")  # GB/s of CPU memory: nothing is too fast
ODD = 0x0101010101010101  # the lowest bit of each byte


class Job:
    """A job in flight, asked for as an engine asks."""

    def __init__(self, worker: Any, number: int, nbytes: int) -> None:
        self._worker = worker
        self._expected = number, True, nbytes
        self._over = False

    @property
    def queued(self) -> bool:
        """Whether a thread of kvplan has yet to issue the job, and needs the interpreter for that."""
        lines = self._worker._lines.values() if isinstance(self._worker, Worker) else ()
        return any(getattr(one, "queued", True) for line in lines for job in line.jobs for one in job.transfers)

    def done(self) -> bool:
        """Whether the worker has reported it.

        Raises:
            RuntimeError: it reports a failure, or something else.
        """
        if not self._over:
            for told in self._worker.get_finished():
                if (told.job_id, told.success, told.transfer_size) != self._expected:
                    raise RuntimeError(f"the worker reports {told}; wanted {self._expected}")
                self._over = True
        return self._over


def finish(job: Job, *, pause: bool = True) -> float:
    """Ask until a job is done; seconds that the last question took."""
    opened = time.perf_counter()
    while True:
        asked = time.perf_counter()
        if job.done():
            return time.perf_counter() - asked
        if asked - opened > PATIENCE:
            raise RuntimeError(f"a job has not ended within {PATIENCE:.0f} seconds")
        if pause or job.queued:
            time.sleep(0)


class Setup:
    """The set-up of all models: the device, vLLM, the ceilings, compute.

    Args:
        scale: how large the run is.
        rig: streams and buffers of the GPU; None for CPU memory.
        vllm: vLLM, where it is there.
    """

    def __init__(self, scale: JobScale, rig: Any = None, vllm: Vllm | None = None) -> None:
        self.scale = scale
        self.rig = rig
        self.vllm = vllm
        self.device = torch.device("cpu") if rig is None else rig.device
        self.copy = dict.fromkeys(DIRECTIONS, NO_LINK)
        self.numbers = count(1)
        self._computes: dict[str, Any] = {}
        self._copies: dict[tuple[str, str], Any] = {}

    @property
    def peer(self) -> Peer:
        """The worker that kvplan's is compared with."""
        return Peer(f"vLLM {self.vllm.version}" if self.vllm else vllm_peer.BATCH, is_vllm=self.vllm is not None)

    def compute(self, kind: str) -> Any:
        """Compute of a kind, made once."""
        from benchmarks.gpu.beside_compute import products

        if kind not in self._computes:
            self._computes[kind] = products(self.rig.scale, kind)
        return self._computes[kind]

    def copy_beside(self, kind: str, direction: str) -> Any:
        """One large copy beside compute of a kind, measured once."""
        from benchmarks.gpu.alone import one_large_copy
        from benchmarks.gpu.beside_compute import BesideCompute, measure

        if (kind, direction) not in self._copies:
            way, compute = one_large_copy(self.rig, direction), self.compute(kind)
            windows = [measure(self.rig.scale, compute, way.begin) for _ in range(self.scale.rounds[kind])]
            self._copies[kind, direction] = BesideCompute.of(windows, way.nbytes)
        return self._copies[kind, direction]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Caches:
    """One model's cache and host rows, and the workers over them: both in vLLM's default layout, and both in BLHNC.

    With ``VLLM_KV_CACHE_LAYOUT=BLHNC``, all layers of a block lie in one piece, and vLLM's connector registers one
    tensor of whole blocks. Here it is the same memory as the default layout's tensors, read in another order.

    Attributes:
        device: (layers, blocks, page) int8: vLLM's default layout, a tensor for each layer.
        whole: (blocks, layers * page) int8 over the same memory: BLHNC.
        pool: (chunks, layers, page) int8, pinned where there is a GPU.
        workers: by name; the first is ours. Those over ``whole`` have the names that :func:`packed` makes.
    """

    def __init__(self, setup: Setup, model: Model) -> None:
        self.setup = setup
        self.model = model
        self.total = max(model.blocks + model.beside)
        layers, page, on_gpu = model.layers, model.page_nbytes, setup.device.type == "cuda"
        self.device = torch.empty((layers, self.total, page), dtype=torch.int8, device=setup.device)
        self.pool = torch.empty((self.total, layers, page), dtype=torch.int8, pin_memory=on_gpu)
        self.whole = self.device.view(self.total, layers * page)
        caches, rows = list(self.device), self.pool.view(self.total, -1)
        group, one = [_Reference(k, page) for k in range(layers)], [_Reference(0, layers * page)]
        self.workers = {
            OURS: Worker([group], caches, list(self.pool.unbind(1)), blocks_per_chunk=1),
            setup.peer.name: _peer(setup, caches, rows),
            packed(OURS): Worker([one], [self.whole], [rows], blocks_per_chunk=1),
            packed(setup.peer.name): _peer(setup, [self.whole], rows),
        }

    def specs(self, blocks: int) -> list[Specs]:
        """Jobs of as many blocks, of other ids each."""
        return [specs_of(self.setup.vllm, blocks, self.total, seed) for seed in range(DIFFERENT)]

    def begin(self, name: str, direction: str, specs: Specs) -> Job:
        """Submit a job."""
        number, worker = next(self.setup.numbers), self.workers[name]
        if direction == "store":
            worker.submit_store(number, specs.device, specs.host)
        else:
            worker.submit_load(number, specs.host, specs.device)
        return Job(worker, number, self.model.nbytes(len(specs.blocks)))

    def verify(self, name: str, direction: str, specs: Specs) -> None:
        """Every byte of a job arrives, and no other byte changes.

        Raises:
            RuntimeError: not so.
        """
        blocks, chunks = (torch.from_numpy(ids).to(self.setup.device) for ids in (specs.blocks, specs.chunks))
        store = direction == "store"
        layer_first = name in (OURS, self.setup.peer.name)
        cache = self.device if layer_first else self.whole.view(self.pool.shape)
        source, target = (cache, self.pool) if store else (self.pool, cache)
        made = torch.empty(source.numel() // 8, dtype=torch.int64, device=self.setup.device).random_()
        made |= ODD  # no byte is zero, as those of the target are
        source.view(-1).view(torch.int64).copy_(made)
        target.copy_(torch.zeros_like(target, device=self.setup.device))
        content, wanted = made.view(torch.int8).view(source.shape), torch.zeros_like(target, device=self.setup.device)
        by_block = (content if store else wanted).transpose(0, 1) if layer_first else (content if store else wanted)
        if store:
            wanted[chunks] = by_block[blocks]
        else:
            by_block[blocks] = content[chunks]
        self.setup.synchronize()
        finish(self.begin(name, direction, specs))
        if not torch.equal(target.to(self.setup.device), wanted):
            raise RuntimeError(f"{name}: not every byte of {direction} of {len(blocks)} blocks is right")

    def paths(self, name: str = OURS) -> dict[str, int]:
        """Transfers of a worker of ours so far, by path."""
        return {path: sums.transfers for path, sums in (self.workers[name]._executors[0].stats().paths or {}).items()}

    def peer_by(self, direction: str, name: str = "") -> str:
        """How another worker moves the blocks; by default the one over vLLM's default layout."""
        if self.setup.vllm is None or direction == "store":
            return "batch"
        return vllm_peer.loads_by(self.workers[name or self.setup.peer.name])

    def close(self) -> None:
        """Shut the workers down."""
        for worker in self.workers.values():
            worker.shutdown()


class _Reference(NamedTuple):
    tensor_idx: int
    page_size_bytes: int
    mapping: None = None


def _peer(setup: Setup, caches: list[Tensor], rows: Tensor) -> Any:
    if setup.vllm is not None:
        return vllm_peer.vllm_worker(setup.vllm, caches, rows)
    if setup.device.type == "cpu":
        return BatchWorker(caches, rows, by_memmove)
    return BatchWorker(caches, rows, vllm_peer.on_line(setup.rig.lines["load"]))
