"""One engine in this process: ``python -m tests.whole_engines.engine SETUP ANSWER``, two JSON files.

It serves the works of its setup, one after another, and then says what is left in it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from tests.whole_engines.work import WORKS

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # scheduler and worker are looked at, and failures are put there


class Engine:
    """vLLM's ``LLM`` in this process."""

    def __init__(self, arguments: dict[str, Any], likely: int = 0) -> None:
        from vllm import LLM

        self.likely = likely or None  # most likely tokens of each step, which are told with their log probabilities
        self.llm = LLM(**arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.waits = self._watch_waits()

    def _watch_waits(self) -> list[str]:
        """Note each time that a hit waits for the next step, to load by layer there."""
        connector, found = one_of(self.scheduler.connector), list[str]()
        budget = getattr(getattr(connector, "_in_scheduler", None), "budget", None)
        if budget is not None:
            ask = connector.get_num_new_matched_tokens

            def watched(request: Any, computed: int) -> Any:
                answer = ask(request, computed)
                found.extend([request.request_id] * budget.waits(request.request_id))
                return answer

            connector.get_num_new_matched_tokens = watched
        return found

    def generate(self, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
        """Serve prompts at once, by greedy sampling; then step until no job is left, as a server does."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=self.likely
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self.llm.generate(given, sampling, use_tqdm=False)
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        return [{"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens,
                 **self.told(one.outputs[0].logprobs)} for one in answers]  # fmt: skip

    def told(self, steps: Any) -> dict[str, Any]:
        """The most likely tokens of each step, if they are told."""
        if not self.likely:
            return {}
        return {"likely": [[(token, entry.logprob) for token, entry in step.items()] for step in steps]}

    def metrics(self) -> dict[str, float]:
        """Values of vLLM's counters and gauges, added up over their labels."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found

    def left(self) -> dict[str, int]:
        """What must not be left when no request is served: blocks, requests and jobs."""
        found = {
            "used blocks": self.used_blocks(),
            "requests": len(self.scheduler.requests),
        }
        if self.scheduler.connector is None:
            return found
        connector = one_of(self.scheduler.connector)
        if self.has_lmcache():
            return found  # LMCache keeps its own books
        offload = connector.connector_scheduler
        queues = self.worker().queues.values()
        return found | {
            "jobs of the scheduler": len(offload._jobs),
            "requests of the connector": len(offload._req_status),
            "fenced blocks": len(offload._block_id_to_pending_jobs),
            "jobs of the worker": sum(len(queue.jobs) for queue in queues),
        }

    def used_blocks(self) -> int:
        """Blocks of requests; one other block is vLLM's null block."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def has_lmcache(self) -> bool:
        """Whether LMCache holds the cache."""
        return hasattr(self.scheduler.connector, "_lmcache_engine")

    def worker(self) -> Any:
        """kvplan's worker, or its connector of LMCache."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = one_of(get_kv_transfer_group())
        if hasattr(group, "_lmcache_engine"):
            return group._lmcache_engine.lmcache_engine.gpu_connector
        return getattr(group, "worker_handler", None) or group.connector_worker.worker


def one_of(connector: Any) -> Any:
    """A connector, or the one that vLLM's ``MultiConnector`` holds."""
    return getattr(connector, "_connectors", [connector])[0]


def schedule_ahead() -> None:
    """Let vLLM schedule a step before the last one has ended on a CPU, too, as it does on GPUs."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def check_and_update_config(_: type, config: Any) -> None:
        update(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def main() -> None:
    """Start, serve, and write the answer."""
    setup, answer = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    faults = None
    if setup["faults"]:
        from tests.whole_engines.faults import Faults

        faults = Faults(**setup["faults"])
        faults.install()
    if setup["ahead"]:
        schedule_ahead()
    if setup["arguments"].get("load_format") == "dummy":
        from benchmarks.engines.engine import scatter_dummy_weights

        scatter_dummy_weights()
    engine = Engine(setup["arguments"], setup["likely"])
    found: dict[str, Any] = {"answers": {name: WORKS[name](engine.generate) for name in setup["works"]}}
    found |= {"metrics": engine.metrics(), "left": engine.left(), "faults": dict(faults.made) if faults else {}}
    found["waits"] = len(engine.waits)
    if engine.scheduler.connector is not None:
        found["worker"] = type(engine.worker()).__name__
        found["connector"] = type(one_of(engine.scheduler.connector)).__name__
    executor = engine.worker().executor if engine.has_lmcache() else None
    engine.core.shutdown()
    if executor is not None:
        executor.close()  # neither vLLM nor LMCache ends a connector of LMCache
    found["threads"] = [thread.name for thread in threading.enumerate() if "kvplan" in thread.name.lower()]
    answer.write_text(json.dumps(found))
    if executor is not None:
        os._exit(0)  # threads of LMCache keep the process, and ending them aborts it within ZeroMQ


if __name__ == "__main__":
    main()
