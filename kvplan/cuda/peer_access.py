"""Access of one GPU to the memory of another: whether the driver allows it, and how it is enabled."""

from __future__ import annotations

from ctypes import byref, c_int, c_void_p

from kvplan.cuda.driver import ALREADY_ENABLED, PEER_UNSUPPORTED, TOO_MANY_PEERS, Driver

REMEDY = (
    "Usual causes are MIG, a virtual machine, and GPUs or PCIe bridges without peer access; "
    "`nvidia-smi topo -p2p r` names the cause"
)
_REFUSALS = {PEER_UNSUPPORTED: REMEDY, TOO_MANY_PEERS: "Without NVSwitch, a GPU has at most 8 peers"}


def count(cu: Driver) -> int:
    """Return the number of visible GPUs.

    Raises:
        DriverError: the driver does not tell it.
    """
    found = c_int()
    cu.check("cuDeviceGetCount", cu.cuDeviceGetCount(byref(found)))
    return found.value


def number(cu: Driver, ordinal: int) -> int:
    """Return the driver's handle of a visible GPU.

    Raises:
        DriverError: the driver does not have the GPU.
    """
    found = c_int()
    cu.check("cuDeviceGet", cu.cuDeviceGet(byref(found), ordinal))
    return found.value


def refusal(cu: Driver, gpu: int, peer: int) -> str:
    """Return why a GPU cannot reach the memory of another, or "" if it can. No context is opened.

    Args:
        cu: the driver.
        gpu: ordinal of the GPU that reads and writes.
        peer: ordinal of the GPU whose memory it is.

    Raises:
        DriverError: a call failed.
    """
    visible = count(cu)
    for ordinal in (gpu, peer):
        if not 0 <= ordinal < visible:
            return f"there is no CUDA device {ordinal}; {visible} are visible"
    if gpu == peer:
        return ""
    can = c_int()
    code = cu.cuDeviceCanAccessPeer(byref(can), number(cu, gpu), number(cu, peer))
    cu.check("cuDeviceCanAccessPeer", code, f"cuda:{gpu} to cuda:{peer}")
    if can.value:
        return ""
    return f"cuda:{gpu} cannot reach the memory of cuda:{peer}: cuDeviceCanAccessPeer returned no. {REMEDY}"


def enable(cu: Driver, gpu: int, peer: int) -> str:
    """Enable access from the current context to a peer's primary context, which stays open.

    Args:
        cu: the driver.
        gpu: ordinal of the GPU whose primary context is current; it can reach the peer.
        peer: ordinal of the peer.

    Returns:
        "", or the reason why this pair cannot be enabled.

    Raises:
        DriverError: a call failed for another reason, such as too little memory for the peer's context.
    """
    context = c_void_p()
    code = cu.cuDevicePrimaryCtxRetain(byref(context), number(cu, peer))
    cu.check("cuDevicePrimaryCtxRetain", code, f"cuda:{peer}")
    code = cu.cuCtxEnablePeerAccess(context.value, 0)
    if code in _REFUSALS:
        why = f"cuda:{gpu} cannot reach the memory of cuda:{peer}: cuCtxEnablePeerAccess returned {cu.name(code)}"
        return f"{why}. {_REFUSALS[code]}"
    if code != ALREADY_ENABLED:  # torch, NCCL and other libraries enable it too
        cu.check("cuCtxEnablePeerAccess", code, f"cuda:{gpu} to cuda:{peer}")
    return ""
