"""An adapter for LMCache: kvplan moves tokens between an engine's cache and memory objects, as a GPU connector.

LMCache still decides which tokens are stored, where, and for how long. Source: LMCache 0.5.6,
``v1/gpu_connector/gpu_connectors.py`` (``GPUConnectorInterface`` and its subclasses for vLLM and SGLang) and
``v1/cache_engine.py``, which calls them; ``v1/gpu_connector/__init__.py`` (``CreateGPUConnector``), which its adapters
for vLLM and SGLang call, and which :func:`plugin` replaces where ``KVPLAN_LMCACHE`` is set.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

from kvplan.backends import lmcache as backend
from kvplan.base.values import integer
from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines import versions
from kvplan.engines.lmcache.objects import ObjectPrograms, chunks_of
from kvplan.engines.plugins import after_import, asked_policy, show_lines
from kvplan.engines.shared import current_stream, prepare
from kvplan.errors import KVPlanError, LayoutError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import compile
from kvplan.plan.plan import Plan, join

WRITTEN_FOR = versions.LMCACHE.written_for  # the version of LMCache whose members are used here

VARIABLE = "KVPLAN_LMCACHE"
MODULE, MAKER = "lmcache.v1.gpu_connector", "CreateGPUConnector"
ENGINES = ("VLLM", "SGLANG")
log = logging.getLogger("kvplan.engines.lmcache")

Caches = KVLayout | Sequence[KVLayout]
Source = Caches | Callable[[Any], Caches]


class Connector:
    """A GPU connector of LMCache that plans all objects of a call as one transfer.

    A chunk may have any slots; if they form whole blocks, whole blocks are moved. Objects in one buffer of LMCache's
    allocators share their programs. As with LMCache's own connectors, a call returns when the bytes have arrived. Only
    :meth:`store` and :meth:`load` return at once.

    Args:
        caches: layout of the engine's cache, or one layout per kernel group if objects hold several groups. Or a
            function that makes layouts from LMCache's ``kvcaches``; it is called again only for other tensors.
        executor: the executor that moves the plans; its device must be the cache's device.
        own: LMCache's connector, which provides all other attributes.

    Attributes:
        executor, own: as given.

    >>> from types import SimpleNamespace
    >>> import kvplan, numpy as np, torch
    >>> cache = [torch.full((2, 8, 4, 2, 8), 7, dtype=torch.float16) for layer in range(3)]
    >>> chunk = torch.zeros((2, 3, 8, 16), dtype=torch.float16)
    >>> memory = SimpleNamespace(tensor=chunk, get_tensor=lambda group: chunk, metadata=SimpleNamespace(fmt=None))
    >>> with kvplan.Executor() as executor:
    ...     connector = Connector(backend.describe(cache, engine_format="NL_X_TWO_NB_BS_NH_HS"), executor)
    ...     connector.from_gpu(memory, 0, 8, slot_mapping=[20, 21, 22, 23, 4, 5, 6, 7])
    >>> chunk.min().item(), connector.get_shape(8)
    (7.0, torch.Size([2, 3, 8, 16]))
    """

    def __init__(self, caches: Source, executor: Executor, own: Any = None) -> None:
        self.executor, self.own = executor, own
        self._describe = caches if callable(caches) else None
        self._described: tuple[int, ...] = ()  # addresses of the tensors that were described
        self._programs = None if callable(caches) else ObjectPrograms(_layouts(caches))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("own") is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self.own, name)

    def store(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], *, after: Any = None, **more: Any
    ) -> Transfer:
        """Copy tokens of the engine's cache into memory objects; return at once.

        Args:
            memory_objs: one memory object per chunk.
            starts, ends: first token of each chunk within the sequence, and the first token after the chunk.
            after: the stream that computes the tokens; by default torch's current stream.
            more: ``slot_mapping``, the slot of every token of the sequence; and ``kvcaches``, if a function makes the
                layout.

        Raises:
            BlockIndexError: the lists differ in length, a slot is negative or past the end of the cache, or a chunk has
                more tokens than its object.
            LayoutError: the objects do not fit the cache, or have other content (IncompatibleLayoutsError).
            KVPlanError: ``slot_mapping`` or the cache is missing.
        """
        programs = self._known(more)
        chunks = chunks_of(memory_objs, starts, ends, more.get("slot_mapping"), 0, 0)
        transfer = self._submit(programs.plans(chunks, store=True), after)
        if "k" not in programs.caches[0].parts:
            for memory in memory_objs:  # as LMCache's connectors do; its allocator may set another format
                if (said := getattr(memory.metadata, "fmt", None)) is not None:
                    memory.metadata.fmt = type(said)["KV_MLA_FMT"]
        return transfer

    def load(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], *, after: Any = None, **more: Any
    ) -> Transfer:
        """Copy memory objects into the engine's cache; return at once.

        Args:
            memory_objs, starts, ends, after: as in :meth:`store`.
            more: as in :meth:`store`; ``vllm_cached_tokens``, the number of first tokens that are not written, because
                the cache has them already; ``offset``, the token at which ``slot_mapping`` begins.

        Raises:
            OverlapError: a slot is given twice.
            KVPlanError: as in :meth:`store`.
        """
        programs = self._known(more)
        offset, cached = more.get("offset", 0), more.get("vllm_cached_tokens", 0)
        chunks = chunks_of(memory_objs, starts, ends, more.get("slot_mapping"), offset, cached)
        return self._submit(programs.plans(chunks, store=False), after)

    # LMCache's interface.

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """See :meth:`store`; waits for the bytes."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """See :meth:`load`; waits for the bytes."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        """See :meth:`store`; waits for the bytes."""
        self.store(memory_objs, starts, ends, **kwargs).synchronize()

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        """See :meth:`load`; waits for the bytes."""
        self.load(memory_objs, starts, ends, **kwargs).synchronize()

    def get_shape(self, num_tokens: int) -> Any:
        """Return the shape of a memory object for a number of tokens, as a ``torch.Size``.

        Raises:
            KVPlanError: the cache is not known yet, and ``own`` was not given.
        """
        if self.own is not None:
            return self.own.get_shape(num_tokens)
        import torch

        cache = self._known({}).caches[0]
        planes, layers = len(cache.parts), len(cache.layers)
        nbytes = planes * layers * cache.block_tokens * getattr(torch, cache.dtype).itemsize
        return torch.Size((planes, layers, num_tokens, cache.block_nbytes // nbytes))

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Describe the cache, if ``kvcaches`` are given."""
        if kwargs.get("kvcaches") is not None:
            self._known(kwargs)
        if self.own is not None:
            self.own.initialize_kvcaches_ptr(**kwargs)

    def _known(self, more: dict[str, Any]) -> ObjectPrograms:
        """Return the programs of the cache, which is described if it is another one than before."""
        tensors = more.get("kvcaches")
        if self._describe is not None and tensors is not None:
            addresses = tuple(_addresses(tensors))
            if addresses != self._described:
                self._programs, self._described = ObjectPrograms(_layouts(self._describe(tensors))), addresses
        if self._programs is None:
            raise KVPlanError(
                "the engine's cache is not known yet; pass kvcaches=, or give its layout to the connector"
            )
        return self._programs

    def _submit(self, plans: list[Plan], after: Any) -> Transfer:
        cache = self._known({}).caches[0]
        plan = join(plans or [compile(cache, cache).plan([], [])])
        return self.executor.submit(plan, after=current_stream(cache.device) if after is None else after)


def connect(
    engine: Any,
    *,
    caches: Source | None = None,
    page_size: int = 1,
    device: Any = None,
    policy: Policy | None = None,
) -> Connector:
    """Let kvplan move the tokens that an LMCache engine stores and retrieves.

    LMCache 0.5.6 makes its connector itself; no setting names another. This replaces ``engine.gpu_connector``. To build
    an engine with kvplan, pass a :class:`Connector` to ``LMCacheEngineBuilder.get_or_create``.

    Args:
        engine: an ``LMCacheEngine`` of vLLM or SGLang, such as ``LMCacheEngineBuilder.get(instance_id)``.
        caches: as in :class:`Connector`; by default :func:`described` by the tensors.
        page_size: slots per page, if the format has flat slots (SGLang), which do not show it.
        device: device of the executor; by default the GPU that LMCache gives this worker, or the CPU without a GPU.
        policy: policy of the executor; by default ``Policy(overlap="decode")``, since the model runs meanwhile.

    Raises:
        KVPlanError: ``engine`` is not an engine, has no connector, or has kvplan's already. Or its connector is
            for TensorRT-LLM, or moves layer by layer (``use_layerwise``): LMCache then accepts only its own classes.
    """
    page_size = integer("page_size", page_size, least=1, error=KVPlanError)
    own = getattr(engine, "gpu_connector", None)
    kind = type(own).__name__
    if not hasattr(own, "batched_from_gpu"):
        raise KVPlanError(f"engine is a {type(engine).__name__} without a gpu_connector; give an LMCacheEngine of "
                          f"LMCache {WRITTEN_FOR}")  # fmt: skip
    if isinstance(own, Connector):
        raise KVPlanError("kvplan is this engine's connector already")
    if "Layerwise" in kind or hasattr(own, "register_kv_caches"):
        raise KVPlanError(f"the engine's connector is a {kind}; kvplan replaces connectors of vLLM and SGLang that "
                          "move all layers at once: run without use_layerwise")  # fmt: skip
    serving = "SGLANG" if kind.startswith("SGLang") else "VLLM"
    if caches is None:
        caches = partial(described, serving=serving, metadata=engine.metadata, page_size=page_size)
    engine.gpu_connector = connector = connector_for(own, engine.metadata, caches, device, policy)
    return connector


def connector_for(
    own: Any, metadata: Any, caches: Source, device: Any = None, policy: Policy | None = None
) -> Connector:
    """Make the connector of one worker.

    Args:
        own: LMCache's connector, or None if it has no connector for the device.
        metadata: LMCache's metadata of the worker.
        caches, device, policy: as in :func:`connect`.
    """
    versions.check(versions.LMCACHE)  # not at import: an engine that does not use kvplan loads the plugin, too
    if device is None:
        import torch

        device = f"cuda:{metadata.local_worker_id}" if torch.cuda.is_available() else "cpu"
    executor = Executor(device, policy or BESIDE_COMPUTE)
    prepare(executor)  # kernels are compiled for the first objects
    return Connector(caches, executor, own)


def described(kvcaches: Any, *, serving: str = "VLLM", metadata: Any = None, page_size: int = 1) -> KVLayout:
    """Describe the cache that an engine hands to LMCache, by the tensors alone.

    LMCache 0.5.6 sorts the dims of a tensor by their strides, and finds the format of what comes out by a hint. With
    two heads, different caches then have one shape. But an engine numbers the dims of its tensors always alike, and
    their strides say where the bytes are.

    Args:
        kvcaches: vLLM's: a tensor per layer, ``(block, head, token, content)`` since 0.26, before that ``(2, block,
            token, head, dim)``, ``(block, 2, token, head, dim)``, or latents, ``(block, token, dim)``. SGLang's: a
            tensor ``(slot, head, dim)`` per layer, first all of K, then all of V, in one list or in two; or latents.
        serving: ``"VLLM"`` or ``"SGLANG"``.
        metadata: LMCache's metadata of the worker, which says whether the cache of SGLang holds latents.
        page_size: slots per page of SGLang.

    Raises:
        LayoutError: the tensors have other shapes, or a shape with two meanings.

    >>> import torch
    >>> rows = torch.zeros(9, 16, 2, 64)  # two heads; the token is the outer one in memory
    >>> layout = described([rows.transpose(1, 2)])
    >>> layout.block_tokens, layout.heads, layout.parts
    (16, range(0, 2), ('k', 'v'))
    """
    if serving == "SGLANG":
        latent = getattr(metadata, "use_mla", False)
        if not latent and hasattr(kvcaches[0], "shape"):
            half = len(kvcaches) // 2
            kvcaches = [kvcaches[:half], kvcaches[half:]]
        name = "NL_X_NBBS_ONE_HS" if latent else "TWO_X_NL_X_NBBS_NH_HS"
        return backend.describe(kvcaches, engine_format=name, block_tokens=page_size)
    shape = tuple(kvcaches[0].shape)
    twos = [dim for dim in (0, 1) if len(shape) == 5 and shape[dim] == 2]
    names = {3: "NL_X_NB_BS_HS", 4: "NL_X_NB_NH_BS_CS", 5: "NL_X_TWO_NB_BS_NH_HS" if twos == [0] else
             "NL_X_NB_TWO_BS_NH_HS"}  # fmt: skip
    indexer = shape[-1] == 132 and kvcaches[0].itemsize == 1  # values of a block, then scales: no token by itself
    if len(shape) not in names or (len(shape) == 5 and len(twos) != 1) or indexer:
        raise LayoutError(f"a layer's cache has the shape {shape}, whose dims are not known; give caches=, the layout")
    return backend.describe(kvcaches, engine_format=names[len(shape)])


def _layouts(caches: Caches) -> tuple[KVLayout, ...]:
    layouts = (caches,) if isinstance(caches, KVLayout) else tuple(caches)
    if not layouts or not all(isinstance(layout, KVLayout) for layout in layouts):
        raise LayoutError(f"caches is {caches!r}; give the KVLayout of the engine's cache, or one per kernel group")
    return layouts


def _addresses(tensors: Any) -> Iterator[int]:
    """Yield the addresses of all tensors in nested lists, or in a mapping of such lists."""
    if hasattr(tensors, "data_ptr"):
        yield tensors.data_ptr()
        return
    for inner in tensors.values() if hasattr(tensors, "values") else tensors:
        yield from _addresses(inner)


def plugin() -> None:
    """Let kvplan move the tokens of each LMCache engine, if ``KVPLAN_LMCACHE`` is set. vLLM and SGLang call this.

    With ``KVPLAN_LMCACHE=auto``, the cost model chooses the path; the name of a path selects that path. ``0`` or an
    empty value leaves LMCache unchanged.

    Raises:
        KVPlanError: ``KVPLAN_LMCACHE`` has another value.
    """
    policy = asked_policy(VARIABLE)
    if policy is not None:
        show_lines(log)
        after_import(MODULE, lambda: _replace(policy))


def _replace(policy: Policy) -> None:
    module = sys.modules[MODULE]
    own = getattr(module, MAKER)
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        """Make LMCache's connector, and put kvplan's in front of it where kvplan can serve."""
        name = getattr(engine, "name", str(engine))
        settings = [one for one in ("use_layerwise", "enable_blending") if getattr(config, one, False)]
        if name not in ENGINES or settings:
            why = f"kvplan serves it in {' and '.join(ENGINES)}, and not in {' with '.join([name, *settings])}"
            log.warning("LMCache moves the tokens itself: %s", why)
            return own(config, metadata, engine, layout_hints)
        on_cpu = getattr(module, "torch_device_type", "") == "cpu"
        theirs = None if on_cpu else own(config, metadata, engine, layout_hints)  # LMCache has no connector for CPUs
        log.info("kvplan moves the tokens of LMCache for %s", name)
        caches = partial(described, serving=name, metadata=metadata)
        return connector_for(theirs, metadata, caches, "cpu" if on_cpu else None, policy)

    setattr(module, MAKER, create)
