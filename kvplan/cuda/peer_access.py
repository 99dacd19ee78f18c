"""Access of one GPU to the memory of another: whether the driver allows it, and how it is enabled."""

from __future__ import annotations

from ctypes import byref, c_int, c_void_p

from kvplan.cuda.driver import ALREADY_ENABLED, PEER_UNSUPPORTED, TOO_MANY_PEERS, Driver

REMEDY = (
    "Usual causes are MIG, a virtual machine, and GPUs or PCIe bridges without peer access: "
    "see `kvplan doctor` and `nvidia-smi topo -p2p r`"
)


def refusal(cu: Driver, gpu: int, peer: int) -> str:
    """Return why the driver does not let a GPU reach a peer's memory, or "" if it does. No context is opened.

    Args:
        cu: the driver.
        gpu: ordinal of the GPU that reads and writes.
        peer: ordinal of the GPU whose memory it is.

    Raises:
        TransferError: there is no such GPU, or a call failed.
    """
    can, handles = c_int(), (cu.handle(gpu), cu.handle(peer))
    cu.check("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(byref(can), *handles))
    return "" if can.value else "the driver allows no peer access between them"


def enable(cu: Driver, peer: int) -> str:
    """Enable access from the current context to a peer's primary context, which stays open.

    Args:
        cu: the driver.
        peer: ordinal of the peer, which the GPU of the current context can reach.

    Returns:
        "", or the reason why this pair can never be enabled.

    Raises:
        TransferError: a call failed for another reason, such as too little memory for the peer's context.
    """
    context, handle = c_void_p(), cu.handle(peer)
    cu.check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(byref(context), handle))
    code = cu.cuCtxEnablePeerAccess(context.value, 0)
    if code == PEER_UNSUPPORTED:
        return f"cuCtxEnablePeerAccess returned {cu.name(code)}"
    if code == TOO_MANY_PEERS:
        cu.check("cuCtxEnablePeerAccess", code, "without NVSwitch, a GPU has at most 8 peers")
    if code != ALREADY_ENABLED:  # torch, NCCL and other libraries enable it too
        cu.check("cuCtxEnablePeerAccess", code)
    return ""
