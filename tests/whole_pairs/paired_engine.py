"""One engine of a pair: ``python -m tests.whole_pairs.paired_engine SETUP``, a JSON file.

It connects to the socket that the setup names, answers requests, and then says what is left in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from tests.whole_engines.counters import HITS
from tests.whole_engines.engine import Engine

PATIENCE_S = 30


class PairedEngine(Engine):
    """An engine whose requests tell where their KV cache goes to, or comes from."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.packed = watch_packed()
        super().__init__(arguments)
        self.failed = watch_failures(self.connector_worker())

    def serve(self, prompt: list[int], count: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Serve a prompt by greedy sampling; ``params`` are vLLM's ``kv_transfer_params``."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra)
        (one,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        hits = self.metrics().get(HITS, 0)
        return {"tokens": list(one.outputs[0].token_ids), "params": one.kv_transfer_params, "hits": hits,
                "packed": len(self.packed), "failed": len(self.failed)}  # fmt: skip

    def told_in_the_end(self, held: int) -> dict[str, Any]:
        """What the engine says in the end. It hears in a step that its blocks were read; ``held`` ones never are."""
        until = time.monotonic() + PATIENCE_S
        while self.used_blocks() > held and time.monotonic() < until:
            self.serve([1, 2, 3], 1)
        agent = type(self.connector_worker().nixl_wrapper).__module__
        return {"agent": agent, "used blocks": self.used_blocks()}

    def connector_worker(self) -> Any:
        """The worker of vLLM's NixlConnector; its agent is NIXL's or kvplan's."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker


def watch_packed() -> list[int]:
    """Note the units of each transfer that kvplan has begun to pack for this process."""
    from kvplan.engines.nixl.neighbours import PackedPeer

    found, submit = list[int](), PackedPeer.submit

    def watched(peer: PackedPeer, plan: Any) -> Any:
        made = submit(peer, plan)  # after an error, NIXL moves it
        found.append(plan.units)
        return made

    PackedPeer.submit = watched  # type: ignore[method-assign]
    return found


def watch_failures(worker: Any) -> list[str]:
    """Note the requests whose load fails; vLLM counts their hits all the same."""
    found, handle = list[str](), worker._handle_failed_transfer

    def watched(request: str, *given: Any, **named: Any) -> Any:
        found.append(request)
        return handle(request, *given, **named)

    worker._handle_failed_transfer = watched
    return found


def main() -> None:
    """Start, and answer."""
    setup = json.loads(Path(sys.argv[1]).read_text())
    with Client(setup["address"]) as parent:
        engine = PairedEngine(setup["arguments"])
        parent.send("ready")
        while "held" not in (request := parent.recv()):
            parent.send(engine.serve(**request))
        parent.send(engine.told_in_the_end(**request))
    engine.core.shutdown()
    os._exit(0)  # threads of NIXL and ZeroMQ may outlive the engine


if __name__ == "__main__":
    main()
