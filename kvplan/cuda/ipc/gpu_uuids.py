"""GPUs by their UUID, which all processes of a machine agree on; ``CUDA_VISIBLE_DEVICES`` changes their numbers."""

from __future__ import annotations

import uuid
from ctypes import byref, create_string_buffer

from kvplan.cuda import peer_access
from kvplan.cuda.driver import Driver
from kvplan.errors import PathError


def uuid_of(cu: Driver, ordinal: int) -> str:
    """Return the UUID of a visible GPU, as ``nvidia-smi -L`` shows it without its prefix.

    Raises:
        TransferError: there is no such GPU.
    """
    found = create_string_buffer(16)
    cu.check("cuDeviceGetUuid", cu.cuDeviceGetUuid_v2(byref(found), cu.handle(ordinal)))
    return str(uuid.UUID(bytes=found.raw))


def visible(cu: Driver) -> dict[str, int]:
    """Return this process's numbers of all visible GPUs, by their UUID."""
    return {uuid_of(cu, ordinal): ordinal for ordinal in range(cu.devices())}


def ordinal_here(cu: Driver, gpu: str) -> int:
    """Return this process's number of a GPU that another process names by its UUID.

    Raises:
        PathError: the GPU is not visible in this process.
    """
    here = visible(cu)
    if gpu not in here:
        raise PathError(
            f"the other process's memory is of GPU-{gpu}, which this process does not see; it sees "
            f"{', '.join(f'GPU-{each}' for each in here) or 'no GPU'}. "
            "Add it to CUDA_VISIBLE_DEVICES of this process, which may be in any order"
        )
    return here[gpu]


def check_reach(cu: Driver, ordinal: int, owner: int) -> None:
    """Check that a GPU can map memory of another GPU, or of itself. No context is opened.

    Args:
        cu: the driver.
        ordinal: number of the GPU whose kernels read and write the memory.
        owner: number of the GPU that has the memory.

    Raises:
        PathError: the driver allows no access; the message says what the usual causes are.
    """
    why = peer_access.refusal(cu, ordinal, owner) if owner != ordinal else ""
    if why:
        raise PathError(f"cuda:{ordinal} cannot reach the memory of cuda:{owner}: {why}. {peer_access.REMEDY}")
