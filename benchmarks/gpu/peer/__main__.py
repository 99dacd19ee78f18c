"""``python -m benchmarks.gpu.peer``: GPU memory to GPU memory in one process, within one GPU and between GPUs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.gpu.__main__ import measure
from benchmarks.gpu.environment import gpu
from benchmarks.gpu.sizes import PEER_SMOKE, PeerScale
from benchmarks.groups import CEILINGS, parse, parser_for

GROUPS = {
    CEILINGS: "benchmarks.gpu.peer.whole:ceilings",
    "within": "benchmarks.gpu.peer.whole:within",
    "between": "benchmarks.gpu.peer.whole:between",
    "few": "benchmarks.gpu.few:few",
    "beside": "benchmarks.gpu.beside:beside_peer",
    "layouts": "benchmarks.gpu.peer.heads:layouts",
}
GPUS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all groups ran, 1 where one failed or a figure is broken, 2 for usage or too few GPUs."""
    parser = parser_for("benchmarks.gpu.peer", __doc__, GROUPS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --smoke, to try it out")
    parser.set_defaults(budget=150.0)
    chosen = parse(parser, arguments, GROUPS)
    scale = PEER_SMOKE if chosen.smoke else PeerScale()
    if chosen.device == "cpu":
        if not chosen.smoke:
            parser.error("--device cpu measures nothing; give --smoke, too")
        return measure(chosen, GROUPS, scale, ["cpu"] * GPUS, {})
    import torch

    count = torch.cuda.device_count()
    if count < GPUS:
        print(f"{count} CUDA devices: these benchmarks need {GPUS}", file=sys.stderr)
        return 2
    return measure(chosen, GROUPS, scale, [f"cuda:{ordinal}" for ordinal in range(GPUS)], gpu(GPUS), "peer")


if __name__ == "__main__":
    sys.exit(main())
