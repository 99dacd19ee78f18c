"""One engine in a process of its own: ``python -m benchmarks.engines.engine SETUP``, with a JSON object.

A line on stdin is a request, ``{"do": measure, "with": arguments}``. Its answer is a line ``@{json}`` on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.shapes import SHAPES, Chats, Shape, Work
from benchmarks.engines.ways import Way, way_of

MARK = "@"
# vLLM asks for a share of the GPU's memory, although the size of its cache is given. It must not exceed what is free.
GPU_SHARE = 0.12
_DECODED = [1, 2, 4, 8, 16, 24, 32]
# "piecewise" is vLLM's default: decoding replays whole graphs, and a prefill replays a graph for each piece between two
# attention layers. TorchInductor's kernels are left out, since compiling them takes minutes.
GRAPHS = {
    "piecewise": {
        "mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [*_DECODED, 64, 144, 288, 512, 528, 1024, 2048],
    },
    "decode": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": _DECODED},
}  # fmt: skip
_ATTENTION = ("qkv_proj", "q_proj", "kv_a_proj", "kv_b_proj")
_DECAY = -0.01  # of the states of a state-space model


@dataclass(frozen=True)
class Setup:
    """What a child process is started with.

    Attributes:
        shape: key of :data:`benchmarks.engines.shapes.SHAPES`.
        way: name of a way.
        work: sizes.
        device: "cuda" or "cpu".
        graphs: key of :data:`GRAPHS`.
    """

    shape: str
    way: str
    work: Work
    device: str
    graphs: str = "piecewise"

    @classmethod
    def read(cls, text: str) -> Setup:
        """Read what :func:`dataclasses.asdict` and JSON wrote."""
        given = json.loads(text)
        work = {key: tuple(value) if isinstance(value, list) else value for key, value in given["work"].items()}
        chats = Chats(**work.pop("chats"))
        return cls(given["shape"], given["way"], Work(**work, chats=chats), given["device"], given["graphs"])


def say(**answer: Any) -> None:
    """Write one answer."""
    print(MARK + json.dumps(answer), flush=True)


def pool_nbytes(shape: Shape, work: Work) -> int:
    """Return the bytes of the host pool."""
    return work.host_tokens * shape.token_nbytes


def transfer_config(way: Way, shape: Shape, work: Work) -> dict[str, Any] | None:
    """Return vLLM's ``kv_transfer_config`` with the size of the host pool, or None without offloading."""
    if not way.config:
        return None
    config = {**way.config, "kv_connector_extra_config": dict(way.config["kv_connector_extra_config"])}
    extra = config["kv_connector_extra_config"]
    if way.base != "lmcache":
        extra["cpu_bytes_to_use"] = pool_nbytes(shape, work)
    return config


def environment(way: Way, shape: Shape, work: Work) -> dict[str, str]:
    """Return the environment variables of the engine's process, besides the parent's."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_DISABLE_COMPILE_CACHE": "1",  # engines start side by side
        **way.env,
    }
    if way.base == "lmcache":
        found["LMCACHE_MAX_LOCAL_CPU_SIZE"] = f"{pool_nbytes(shape, work) / (1 << 30):.2f}"
    return found


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM``, without the model and the connector."""
    work = setup.work
    arguments: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": True, "disable_log_stats": True,
        "max_model_len": work.longest, "block_size": work.block, "max_num_batched_tokens": work.batch,
        "max_num_seqs": 32, "num_gpu_blocks_override": work.gpu_tokens // work.block,
    }  # fmt: skip
    if setup.device == "cpu":
        return {**arguments, "enforce_eager": True, "dtype": "float32"}
    cache = work.gpu_tokens * SHAPES[setup.shape].token_nbytes
    return {**arguments, "gpu_memory_utilization": GPU_SHARE, "kv_cache_memory_bytes": cache,
            "compilation_config": GRAPHS[setup.graphs]}  # fmt: skip


def start(setup: Setup) -> Any:
    """Start the engine, with random weights that make a token depend on the whole prompt."""
    from vllm import LLM

    scatter_dummy_weights()
    folder = tempfile.TemporaryDirectory(prefix="kvplan-engine-")
    (Path(folder.name) / "config.json").write_text(json.dumps(SHAPES[setup.shape].config))
    config = transfer_config(way_of(setup.way), SHAPES[setup.shape], setup.work)
    more = {} if config is None else {"kv_transfer_config": config}
    llm = LLM(model=folder.name, **engine_arguments(setup), **more)
    folder.cleanup()
    return llm


def scatter_dummy_weights() -> None:
    """Let vLLM's format ``dummy`` give a model the weights of :func:`scatter_weights`."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda _, model, *_config: scatter_weights(model)  # vLLM packs them afterwards


def scatter_weights(model: Any) -> None:
    """Give a model random weights, the same in every engine of a shape.

    Under vLLM's dummy weights, attention adds next to nothing to a token's logits. Here queries and keys are large, so
    that attention picks few tokens, and all other matrices keep the size of their input. The states of a state-space
    model fade by 1 % a token or so; they would grow without end if the factor of this decay were not negative.
    """
    import torch

    for number, (name, weight) in enumerate(model.named_parameters()):
        with torch.no_grad():
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else _DECAY if name.endswith(".A") else 1.0)
                continue
            source = torch.Generator(device=weight.device).manual_seed(number)
            attends = any(word in name for word in _ATTENTION)
            size = 1.0 if "embed" in name else (2.0 if attends else 1.0) / weight.shape[-1] ** 0.5
            weight.normal_(0.0, size, generator=source)


def serve(llm: Any, setup: Setup) -> None:
    """Answer requests until stdin ends."""
    from benchmarks.engines.measures import Measures

    measures = Measures(llm, setup.work)
    known = {name: getattr(measures, name) for name in Measures.NAMES}
    for line in sys.stdin:
        request = json.loads(line)
        gc.collect()
        try:
            say(**known[request["do"]](**request["with"]))
        except Exception as error:  # the parent decides; other measures may work
            traceback.print_exc()
            say(error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Start the engine and serve."""
    setup = Setup.read(sys.argv[1])
    os.environ.update(environment(way_of(setup.way), SHAPES[setup.shape], setup.work))
    began = time.perf_counter()
    llm = start(setup)
    say(started=round(time.perf_counter() - began, 1), connector=connector_of(llm))
    serve(llm, setup)
    sys.stdout.flush()
    os._exit(0)  # threads of an engine may outlive it; the kernel frees the host pool


def connector_of(llm: Any) -> str:
    """Return the name of the connector's class, or ""."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    return "" if connector is None else type(connector).__name__


if __name__ == "__main__":
    main()
