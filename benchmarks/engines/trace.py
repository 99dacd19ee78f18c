"""Where the milliseconds of a hit go: spans of the engine's thread, and busy intervals of the GPU.

The profiler records the GPU only, since records of every operator on the CPU would slow an eager forward pass down.
The spans of the engine's thread are taken by wrapped functions, which cost a microsecond each.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks.engines.measures import Measures

_WARM_UPS = 3
_TAIL_S = 1e-3  # what the GPU does so long after a hit is kept, too
_SHORT_MS = 0.02  # shorter spans are counted, and not drawn
_TOUCHING_MS = 0.01  # busy intervals that are closer than this are drawn as one
_GPU_MARK = "cudaDeviceSynchronize"
_COPY_KERNELS = ("copy_rows", "swap_blocks", "copy_blocks")  # kvplan's kernel, and those of vLLM's connectors


class Hook(NamedTuple):
    """A function to be timed: where it is found, its name, and the span's name."""

    place: str
    function: str
    span: str


# Places are found by :func:`places`; a place or function that this engine lacks is left out.
HOOKS = (
    Hook("engine", "add_request", "add request (hashes)"),
    Hook("core", "step", "step"),
    Hook("core", "step_with_batch_queue", "step"),
    Hook("scheduler", "schedule", "schedule"),
    Hook("connector", "get_num_new_matched_tokens", "look up"),
    Hook("blocks", "allocate_slots", "allocate blocks"),
    Hook("connector", "update_state_after_alloc", "prepare load"),
    Hook("connector", "build_connector_meta", "metadata"),
    Hook("scheduler", "update_from_output", "update"),
    Hook("worker", "execute_model", "execute model"),
    Hook("runner", "prepare_inputs", "input preparation"),
    Hook("runner", "prepare_attn", "input preparation"),
    Hook("runner", "_prepare_inputs", "input preparation"),
    Hook("runner", "_build_attention_metadata", "input preparation"),
    Hook("group", "start_load_kv", "submit loads"),
    Hook("model", "forward", "forward"),
    Hook("group", "wait_for_layer_load", "layer wait"),
    Hook("group", "save_kv_layer", "layer store"),
    Hook("group", "wait_for_save", "submit stores"),
    Hook("group", "get_finished", "poll transfers"),
    Hook("group", "get_transfer_results", "poll transfers"),
    Hook("worker", "sample_tokens", "sampling"),
    Hook("vllm.v1.worker.gpu.async_utils:AsyncOutput", "get_output", "wait for the token"),
    Hook("output", "process_outputs", "output"),
    Hook("kvplan.execute.executor:Executor", "submit", "kvplan: submit"),
)
Span = tuple[str, float, float]  # name, start and duration; seconds of time.perf_counter(), or ms after a hit's start


def places(llm: Any) -> dict[str, Any]:
    """Return the objects of an engine whose functions are timed."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    found = {
        "engine": llm.llm_engine, "core": core, "scheduler": core.scheduler, "connector": core.scheduler.connector,
        "blocks": core.scheduler.kv_cache_manager, "worker": worker, "runner": worker.model_runner,
        "model": worker.model_runner.get_model(), "output": llm.llm_engine.output_processor,
        "group": get_kv_transfer_group() if has_kv_transfer_group() else None,
    }  # fmt: skip
    return {name: place for name, place in found.items() if place is not None}


def place_of(hook: Hook, known: Mapping[str, Any]) -> Any:
    """Return the object or class of a hook, or None."""
    module, _, name = hook.place.partition(":")
    if not name:
        return known.get(hook.place)
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


@contextmanager
def timed(known: Mapping[str, Any], hooks: Iterable[Hook] = HOOKS) -> Iterator[list[Span]]:
    """Time the calls of the hooks' functions, and yield the list that they are added to.

    >>> class Engine:
    ...     def step(self):
    ...         return 3
    >>> engine = Engine()
    >>> with timed({"core": engine}) as spans:
    ...     answer = engine.step()
    >>> answer, [name for name, *_ in spans], "step" in vars(engine)
    (3, ['step'], False)
    """
    spans: list[Span] = []
    undo: list[Callable[[], None]] = []
    for hook in hooks:
        place = place_of(hook, known)
        function = getattr(place, hook.function, None)
        if function is None:
            continue
        before = vars(place).get(hook.function)
        setattr(place, hook.function, _wrapped(function, hook.span, spans))
        undo.append(_undoing(place, hook.function, before))
    try:
        yield spans
    finally:
        for back in reversed(undo):
            back()


def _wrapped(function: Callable[..., Any], span: str, spans: list[Span]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            spans.append((span, began, time.perf_counter() - began))

    return call


def _undoing(place: Any, function: str, before: Any) -> Callable[[], None]:
    return (lambda: delattr(place, function)) if before is None else (lambda: setattr(place, function, before))


def traced(measures: Measures, held: int, suffix: int, hits: int, first: int) -> dict[str, Any]:
    """Serve hits alone, once without the profiler and once with it, and return the trace of the median one."""
    measures.alone(held, suffix, _WARM_UPS, first)
    plain = measures.alone(held, suffix, hits, first + 20)["ttft"]
    known = places(measures.llm)
    served: list[tuple[float, float]] = []
    with timed(known) as spans, tempfile.TemporaryDirectory() as folder, _profiled(Path(folder)) as events:
        for k in range(hits):
            prompt = measures.prompt(held, first + 40 + k, suffix)
            measures.empty_gpu()
            began = time.perf_counter()
            measures.generate([prompt], measures.sampling(1))
            served.append((began, time.perf_counter() - began))
        time.sleep(0.05)  # stores of the last hit
    times = [seconds for _, seconds in served]
    chosen = times.index(statistics.median_low(times))
    return {
        "held": held, "suffix": suffix, "ttft_ms": _ms(times), "untraced_ttft_ms": _ms(plain), "chosen": chosen,
        **cut(spans, events, *served[chosen]),
    }  # fmt: skip


def _ms(times: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 3) for one in times]


@contextmanager
def _profiled(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Record the GPU, and yield a list that its records are added to at the end, in seconds of time.perf_counter()."""
    import torch

    found: list[dict[str, Any]] = []
    if not torch.cuda.is_available():
        yield found
        return
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    torch.cuda.synchronize()
    mark = time.perf_counter()  # the profiler's clock is another one: the end of this call ties them
    yield found
    torch.cuda.synchronize()
    profiler.stop()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    found += aligned(json.loads(path.read_text())["traceEvents"], mark)


def aligned(records: Iterable[Mapping[str, Any]], mark: float) -> list[dict[str, Any]]:
    """Return the GPU's records of a profile with ``start`` and ``seconds`` by the clock of the engine's spans.

    Args:
        records: ``traceEvents`` of a Chrome trace; times in us.
        mark: the time by that clock at the end of the first call of cudaDeviceSynchronize.

    >>> call = {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 100.0, "dur": 20.0}
    >>> kernel = {"cat": "kernel", "name": "gemm", "ts": 1120.0, "dur": 500.0, "args": {"stream": 7}}
    >>> aligned([kernel, call], mark=50.0)
    [{'kind': 'compute', 'start': 50.001, 'seconds': 0.0005}]
    """
    records = [one for one in records if "ts" in one and "dur" in one]
    calls = [one for one in records if one.get("name") == _GPU_MARK and str(one.get("cat", "")).startswith("cuda")]
    if not calls:
        return []
    first = min(calls, key=lambda one: float(one["ts"]))
    shift = mark - (float(first["ts"]) + float(first["dur"])) * 1e-6
    return [
        {"kind": kind, "start": round(float(one["ts"]) * 1e-6 + shift, 9), "seconds": float(one["dur"]) * 1e-6}
        for one in records
        if (kind := kind_of(one))
    ]


def kind_of(record: Mapping[str, Any]) -> str:
    """Return "copies in", "copies out", "copy kernels" or "compute"; "" for a record of the CPU.

    >>> kind_of({"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)"})
    'copies in'
    """
    category, name = str(record.get("cat", "")), str(record.get("name", ""))
    if category == "gpu_memcpy":
        return "copies in" if "HtoD" in name else "copies out" if "DtoH" in name else "compute"
    if category != "kernel":
        return ""
    return "copy kernels" if any(word in name for word in _COPY_KERNELS) else "compute"


def cut(spans: Iterable[Span], events: Iterable[Mapping[str, Any]], began: float, seconds: float) -> dict[str, Any]:
    """Return the spans and the GPU's busy intervals of one hit, in ms after its start.

    ``spans`` has the longer ones only; ``totals`` has the number of calls and the ms of all, by name.

    >>> found = cut([("step", 5.001, 0.02), ("layer wait", 5.002, 0.00001), ("step", 9.0, 1.0)],
    ...             [{"kind": "compute", "start": 5.004, "seconds": 0.01}], 5.0, 0.03)
    >>> found["ms"], found["spans"], found["totals"]
    (30.0, [['step', 1.0, 20.0]], {'step': [1, 20.0], 'layer wait': [1, 0.01]})
    >>> found["gpu"], found["busy_ms"]
    ({'compute': [[4.0, 10.0]]}, {'compute': 10.0})
    """
    end = began + seconds
    ordered = sorted(spans, key=lambda one: (one[1], -one[2]))
    inside = [(name, 1e3 * (start - began), 1e3 * length) for name, start, length in ordered if began <= start <= end]
    totals: dict[str, list[float]] = {}
    for name, _, length in inside:
        total = totals.setdefault(name, [0, 0.0])
        total[0], total[1] = total[0] + 1, round(total[1] + length, 4)
    gpu: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if began <= event["start"] <= end + _TAIL_S:
            start = 1e3 * (event["start"] - began)
            gpu.setdefault(event["kind"], []).append((start, start + 1e3 * event["seconds"]))
    merged = {kind: list(joined(intervals)) for kind, intervals in sorted(gpu.items())}
    busy = {kind: round(sum(length for _, length in intervals), 3) for kind, intervals in merged.items()}
    kept = [[name, round(start, 3), round(length, 3)] for name, start, length in inside if length >= _SHORT_MS]
    return {"ms": round(1e3 * seconds, 3), "spans": kept, "totals": totals, "gpu": merged, "busy_ms": busy}


def joined(intervals: Iterable[tuple[float, float]], touching: float = _TOUCHING_MS) -> Iterator[list[float]]:
    """Yield the start and the length of busy times, given starts and ends that may overlap.

    >>> list(joined([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)]))
    [[0.0, 2.0], [3.0, 1.0]]
    """
    at: list[float] = []
    for start, end in sorted(intervals):
        if at and start <= at[1] + touching:
            at[1] = max(at[1], end)
            continue
        if at:
            yield [round(at[0], 4), round(at[1] - at[0], 4)]
        at = [start, end]
    if at:
        yield [round(at[0], 4), round(at[1] - at[0], 4)]
