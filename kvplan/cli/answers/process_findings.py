"""``kvplan bench --peer process``: its arguments, and its findings in words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import rounded
from kvplan.base.quoting import quoted
from kvplan.cli.arguments.values import gpu
from kvplan.errors import KVPlanError

if TYPE_CHECKING:
    from kvplan.measure.processes.process_bench import Findings, ProcessBench

PROCESS = "process"
# Options that a bench of two processes does not take, by their names in the arguments.
_NOT_TAKEN = ("counts", "paths", "beside", "beside_on", "plot")


def peer_name(text: str) -> str:
    """Read a peer: a GPU, another process, or another process with its GPU.

    >>> peer_name("cuda:1"), peer_name("process"), peer_name("process:cuda:1")
    ('cuda:1', 'process', 'process:cuda:1')
    """
    head, _, rest = text.partition(":")
    if head != PROCESS:
        return gpu(text)
    return f"{PROCESS}:{gpu(rest)}" if rest else PROCESS


def is_process(peer: str | None) -> bool:
    """Return whether a peer is another process.

    >>> is_process("process:cuda:1"), is_process("cuda:1"), is_process(None)
    (True, False, False)
    """
    return peer is not None and peer.partition(":")[0] == PROCESS


def process_bench(args: argparse.Namespace, device: str, visible: Callable[[], int]) -> ProcessBench:
    """Return the bench of two processes that the arguments ask for.

    Args:
        args: the arguments of the command.
        device: the device of this process.
        visible: function that returns how many GPUs there are.

    Raises:
        KVPlanError: an argument does not fit.
    """
    from kvplan.measure.processes.process_bench import HOST_NBYTES, KIB, MIB, ProcessBench

    for name in _NOT_TAKEN:
        if getattr(args, name) is not None:
            raise KVPlanError(f"--{name.replace('_', '-')} does not go with --peer {quoted(args.peer).strip(chr(39))}")
    told: dict[str, Any] = {name: value for name, value in (
        ("sizes", args.sizes), ("directions", args.directions), ("hosts", args.hosts), ("seconds", args.seconds),
        ("most_nbytes", args.memory),
    ) if value is not None}  # fmt: skip
    if args.quick:
        told = {"sizes": (8 * KIB, 64 * KIB), "most_nbytes": 64 * MIB, "seconds": 30.0} | told
    if device == "cpu":
        told = {"sizes": (2 * KIB, 8 * KIB, 64 * KIB), "most_nbytes": HOST_NBYTES, "layer_nbytes": MIB} | told
    return ProcessBench(device, _device_of_peer(args.peer, device, visible), **told)


def _device_of_peer(peer: str, device: str, visible: Callable[[], int]) -> str:
    asked = peer.partition(":")[2]
    if asked or device == "cpu":
        return asked or "cpu"
    others = [f"cuda:{k}" for k in range(visible()) if f"cuda:{k}" != device]
    return others[0] if others else device


def in_words(found: Findings) -> str:
    """Return the times of a meeting and of one block as sentences."""
    shown = found.document()
    seen, submit = shown["seen"], shown["submit"]
    meet, layers = _milliseconds(found.meet), _milliseconds(found.meet_layers)
    lines = [
        f"transport {found.transport}; a meeting takes {meet} ms, and {layers} ms with an allocation for each layer"
    ]
    if seen["samples"]:
        lines.append(
            f"one block of {rounded(found.block_nbytes)}: {seen['median'] * 1e6:.0f} us from the submit until its note "
            f"is seen\n(1 % take more than {seen['hundredth'] * 1e6:.0f} us); the submit takes "
            f"{submit['median'] * 1e6:.0f} us"
        )
    return "\n".join(lines)


def _milliseconds(taken: list[float]) -> str:
    ordered = sorted(taken)
    return f"{ordered[len(ordered) // 2] * 1e3:.1f}" if ordered else "-"
