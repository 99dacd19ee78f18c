"""Ways of offloading as data: a base, and words that change it, as in ``own-packed-sync``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

_KVPLAN = "kvplan.engines.vllm"
NO_OFFLOADING = "none"


@dataclass(frozen=True)
class Piece:
    """A base or a word of a way.

    Attributes:
        title: what it is, in a table.
        config: entries of vLLM's ``kv_transfer_config``.
        extra: entries of ``kv_connector_extra_config``.
        env: environment variables of the engine's process.
        needs: module that must be installed, or "".
    """

    title: str
    config: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""


BASES = {
    NO_OFFLOADING: Piece("no offloading"),
    "own": Piece("vLLM's OffloadingConnector", {"kv_connector": "OffloadingConnector"}),
    "simple": Piece("vLLM's SimpleCPUOffloadConnector", {"kv_connector": "SimpleCPUOffloadConnector"}),
    "lmcache": Piece(
        "LMCache by layer",
        {"kv_connector": "LMCacheConnectorV1"},
        {"use_layerwise": True},
        # Chunks near LMCache's default of 256 tokens, of which the measured prefixes are multiples.
        {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_USE_LAYERWISE": "True", "LMCACHE_CHUNK_SIZE": "400"},
        needs="lmcache",
    ),
    "kvplan": Piece(
        "kvplan",
        {"kv_connector": "KVPlanOffloadingConnector", "kv_connector_module_path": _KVPLAN},
        {"spec_name": "KVPlanOffloadingSpec", "spec_module_path": _KVPLAN},
    ),
}
WORDS = {
    "packed": Piece("BLHNC", env={"VLLM_KV_CACHE_LAYOUT": "BLHNC"}),  # all layers of a block in one piece
    "sync": Piece("sync", extra={"sync_load_budget_bytes": 8 << 30}),
    "chunks": Piece("chunks of 5 blocks", extra={"blocks_per_chunk": 5}),  # all measured prefixes are whole chunks
    "layers": Piece("by layer", extra={"load_by_layer": True}),
    "kernel": Piece("path kernel", extra={"kvplan": {"path": "kernel"}}),
    "staged": Piece("path staged", extra={"kvplan": {"path": "staged"}}),
    "copy_engine": Piece("path copy_engine", extra={"kvplan": {"path": "copy_engine"}}),
}
DEFAULT = ("own-packed", "own-packed-sync", "simple-packed", "kvplan", "kvplan-layers", "own", "own-sync", "simple",
           NO_OFFLOADING, "lmcache")  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way of offloading.

    Attributes:
        name: its base and words, joined by "-".
        title: its name in tables.
        config: vLLM's ``kv_transfer_config``, without the size of the host pool; empty without offloading.
        env: environment variables of the engine's process.
        needs: module that must be installed, or "".
    """

    name: str
    title: str
    config: Mapping[str, Any]
    env: Mapping[str, str]
    needs: str = ""

    @property
    def base(self) -> str:
        """The first word of the name."""
        return self.name.partition("-")[0]

    @property
    def ours(self) -> bool:
        """Whether it is kvplan's."""
        return self.base == "kvplan"

    @property
    def missing(self) -> bool:
        """Whether a module that it needs is not installed."""
        return bool(self.needs) and find_spec(self.needs) is None


def way_of(name: str) -> Way:
    """Return the way of a name.

    Raises:
        ValueError: the base or a word is unknown.

    >>> way = way_of("own-packed-sync")
    >>> way.title, way.env
    ("vLLM's OffloadingConnector, BLHNC, sync", {'VLLM_KV_CACHE_LAYOUT': 'BLHNC'})
    >>> way.config["kv_connector_extra_config"]
    {'sync_load_budget_bytes': 8589934592}
    >>> way_of("own-fast")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: unknown way 'own-fast'; expected a base of none, own, simple, lmcache, kvplan, and ...
    """
    base, *words = name.split("-")
    if base not in BASES or not set(words) <= set(WORDS):
        raise ValueError(
            f"unknown way {name!r}; expected a base of {', '.join(BASES)}, and after it words of {', '.join(WORDS)}, "
            "joined by -"
        )
    pieces = [BASES[base], *(WORDS[word] for word in words)]
    config: dict[str, Any] = {}
    if base != NO_OFFLOADING:
        extra = {key: value for piece in pieces for key, value in piece.extra.items()}
        config = {**BASES[base].config, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    env = {key: value for piece in pieces for key, value in piece.env.items()}
    return Way(name, ", ".join(piece.title for piece in pieces), config, env, BASES[base].needs)
