"""Baselines between the memories of two GPUs, or within the memory of one: large copies, torch and NCCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from kvplan.base.cached_property import cached_property
from kvplan.errors import PathError, TransferError
from kvplan.measure.baselines import BATCH, COPY, INDEXING, NCCL, Baseline, Maker, batch_call, ends, verified
from kvplan.measure.flights import Begin, Enqueued, Line
from kvplan.measure.peers.nccl import Communicators
from kvplan.measure.workload import Work

if TYPE_CHECKING:
    from torch import Tensor

MOST_COPIES = 131_072  # runs of a transfer that makes a copy for each run: more would take seconds


class Pair:
    """A GPU and its peer, each with a new stream, and what baselines between them share.

    Args:
        device: the GPU that plans are submitted to, ``"cuda:N"``.
        peer: the GPU that holds the pool; it may be the same GPU, which then has one stream.

    Attributes:
        near, far: the GPU, and its peer.

    Raises:
        PathError: one GPU cannot reach the memory of the other.
    """

    def __init__(self, device: str, peer: str) -> None:
        self.near = Line(device)
        self.far = self.near if peer == device else Line(peer)
        for line, other in ((self.near, self.far), (self.far, self.near)):
            why = line.device.enable_peer(other.device.ordinal) if line is not other else ""
            if why:
                raise PathError(why)
        self._staging: dict[str, Any] = {}
        self._communicators: Communicators | None = None

    @property
    def apart(self) -> bool:
        """Return whether these are two GPUs."""
        return self.far is not self.near

    def ends(self, route: str) -> tuple[Line, Line]:
        """Return the GPUs of the source and of the destination of a route."""
        return (self.near, self.far) if route == "push" else (self.far, self.near)

    def staging(self, line: Line, nbytes: int) -> Tensor:
        """Return int64 words in the memory of a GPU. All callers share them: one transfer at a time."""
        import torch

        words = nbytes // 8
        if line.name not in self._staging or self._staging[line.name].numel() < words:
            self._staging.pop(line.name, None)  # free the old tensor first
            self._staging[line.name] = torch.empty(words, dtype=torch.int64, device=line.name)
        held: Tensor = self._staging[line.name][:words]
        return held

    @cached_property
    def _refusal(self) -> str:
        """Start NCCL; return why it does not start, or ""."""
        try:
            self._communicators = Communicators([line.device.ordinal for line in (self.near, self.far)])
        except PathError as error:
            return str(error)
        return ""

    def communicators(self) -> Communicators:
        """Return NCCL's communicators: the GPU has rank 0, its peer rank 1. They are made by the first call.

        Raises:
            PathError: there is no NCCL, or it does not start.
        """
        why = self._refusal
        if why or self._communicators is None:
            raise PathError(why)
        return self._communicators

    def end(self, line: Line, words: Tensor) -> tuple[int, int, int]:
        """Return NCCL's rank of a GPU, the address of memory of it, and its stream."""
        return 0 if line is self.near else 1, words.data_ptr(), line.handle

    def enqueued(self, nbytes: int, issue: Callable[[], object]) -> Enqueued:
        """Start a transfer by calls on the streams of both GPUs."""
        return Enqueued(self.near, nbytes, issue, self.far if self.apart else None)

    def close(self) -> None:
        """Destroy the communicators, and free the staging memory."""
        made, self._communicators = self._communicators, None
        self._staging.clear()
        if made is not None:
            made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def makers(pair: Pair) -> Mapping[str, Maker]:
    """Return, by name, the functions that make a baseline for a work; they raise PathError if they cannot move it."""
    found: dict[str, Maker] = {COPY: partial(one_copy, pair), BATCH: partial(few_copies, pair)}
    if pair.apart:
        found[NCCL] = partial(send, pair)
    return found | {INDEXING: partial(indexing, pair)}


def large_copy(pair: Pair, src: Tensor, dst: Tensor) -> Begin:
    """Return a function that copies one tensor to another, of as many bytes, by one call of the driver."""
    nbytes, line = src.numel() * src.element_size(), pair.near
    issue = partial(line.device.copy, dst.data_ptr(), src.data_ptr(), nbytes, line.handle)
    return lambda: pair.enqueued(nbytes, issue)


def one_copy(pair: Pair, work: Work) -> Baseline:
    """Make the baseline of one copy with the same number of bytes, which lie in one piece."""
    import torch

    words = work.plan.nbytes // 8
    src, dst = (side.parts[0].view(-1)[:words] for side in (work.src, work.dst))
    begin = large_copy(pair, src, dst)

    def verify() -> None:
        dst.bitwise_not_()
        torch.cuda.synchronize(dst.device)
        begin().synchronize()
        if not torch.equal(dst, src.to(dst.device)):
            raise TransferError(f"{COPY}: not every byte of {src.numel() * 8} arrived")

    return Baseline(begin, verify)


def few_copies(pair: Pair, work: Work) -> Baseline:
    """Make the baseline of the driver's batch call, with one descriptor per run."""
    refuse_many(work)
    issue = batch_call(pair.near, work.plan)
    return verified(BATCH, work, lambda: pair.enqueued(work.plan.nbytes, issue))


def refuse_many(work: Work) -> None:
    """Check that a transfer with a copy for each run takes less than seconds.

    Raises:
        PathError: there are too many runs.
    """
    runs = work.geometry.runs
    if runs > MOST_COPIES:
        raise PathError(f"it makes a copy for each run, and {runs:,} runs are more than {MOST_COPIES:,}")


def indexing(pair: Pair, work: Work) -> Baseline:
    """Make the baseline of torch: ``index_select`` on the source GPU, ``copy_``, ``index_copy_`` on the other."""
    import torch

    src, dst, shape = ends(work)
    source, target = pair.ends(work.geometry.direction)

    def issue() -> None:
        from_, to = (pair.staging(line, work.plan.nbytes).view(shape) for line in (source, target))
        # Between GPUs, torch's copy orders the current streams of both.
        with torch.cuda.stream(source.stream), torch.cuda.stream(target.stream):
            src.gather(from_)
            if pair.apart:
                to.copy_(from_, non_blocking=True)
            dst.scatter(to)

    return verified(INDEXING, work, lambda: pair.enqueued(work.plan.nbytes, issue))


def send(pair: Pair, work: Work) -> Baseline:
    """Make the baseline of NCCL: ``index_select`` on the source GPU, a send and its receive, ``index_copy_``.

    Raises:
        PathError: there is no NCCL, or it does not start.
    """
    import torch

    communicators, nbytes = pair.communicators(), work.plan.nbytes
    src, dst, shape = ends(work)
    source, target = pair.ends(work.geometry.direction)

    def issue() -> None:
        from_, to = (pair.staging(line, nbytes).view(shape) for line in (source, target))
        with torch.cuda.stream(source.stream), torch.cuda.stream(target.stream):
            src.gather(from_)
            communicators.send(pair.end(source, from_), pair.end(target, to), nbytes)
            dst.scatter(to)

    return verified(NCCL, work, lambda: pair.enqueued(nbytes, issue))
