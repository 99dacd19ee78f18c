"""Model geometries by name: the layers, heads and cache groups that determine the bytes of a KV cache."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from typing import Any

from kvplan.errors import LayoutError


@dataclass(frozen=True)
class Group:
    """A cache group: layers with equal caches. An engine gives each cache group its own block ids.

    Attributes:
        name: ``"full"``, ``"sliding"``, ``"index"``, ``"state"``, ...
        kind: ``"mha"`` (K and V for each head), ``"mla"`` (one row per token, no heads) or ``"state"`` (one state of
            fixed size per request).
        layers: global numbers of the layers.
        dim: elements per row: of one head's K (V has the same number), of an MLA latent, or of one layer's state.
        heads: KV heads over all ranks; 1 if there is no head axis.
        window: tokens of the sliding window, the present token included; the cache holds these. None for all tokens.
        row_tokens: tokens per row; more than 1 if rows are compressed.
        dtype: dtype of the rows, such as ``"uint8"``, if it differs from the cache's dtype.
        part: the part's name in a layout.
        shards: for a state, the number that the tensor-parallel ranks must divide.
        packed: (name, bytes per row) of quantised row formats.
        whole: for a state, the elements of ``dim`` that every tensor-parallel rank holds whole.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    dim: int
    heads: int = 1
    window: int | None = None
    row_tokens: int = 1
    dtype: str | None = None
    part: str = "kv"
    shards: int = 1
    packed: tuple[tuple[str, int], ...] = ()
    whole: int = 0

    def stored_as(self, dtype: str) -> tuple[int, str]:
        """Return the elements and dtype of a row in a cache of this dtype, which may name a packed row format.

        >>> Group("latent", "mla", (0,), dim=576, packed=(("fp8_ds_mla", 656),)).stored_as("fp8_ds_mla")
        (656, 'uint8')
        """
        packed = dict(self.packed)
        if self.dtype is None and dtype in packed:
            return packed[dtype], "uint8"
        return self.dim, self.dtype or dtype

    def rank_heads(self, tp: int, rank: int = 0) -> range:
        """Return the global numbers of a tensor-parallel rank's heads. If ranks outnumber heads, ranks share a head.

        Raises:
            LayoutError: heads and ranks do not divide each other, or there is no such rank.

        >>> group = Group("full", "mha", (0,), dim=128, heads=8)
        >>> group.rank_heads(4, 1), group.rank_heads(16, 3)
        (range(2, 4), range(1, 2))
        """
        if tp < 1 or not 0 <= rank < tp:
            raise LayoutError(f"rank {rank} of {tp}; ranks are 0 to tp - 1, and tp is at least 1")
        if self.kind != "mha":
            return range(1)
        if self.heads % tp and tp % self.heads:
            raise LayoutError(
                f"{self.heads} KV heads over {tp} tensor-parallel ranks: neither divides the other; "
                f"tp is a divisor or a multiple of {self.heads}"
            )
        count = max(self.heads // tp, 1)
        first = rank * self.heads // tp
        return range(first, first + count)

    def copies(self, tp: int) -> int:
        """Return how many tensor-parallel ranks hold the same bytes: all for a latent, ``tp / heads`` for heads.

        >>> Group("full", "mla", (0,), dim=576).copies(8), Group("full", "mha", (0,), dim=128, heads=4).copies(8)
        (8, 2)
        """
        if self.kind == "state":
            return 1
        return tp if self.kind == "mla" else max(tp // self.heads, 1)

    def rank_share(self, elements: int, tp: int) -> int:
        """Return the elements of a row that one rank holds: its share of a state, or a whole row of another kind.

        Raises:
            LayoutError: the state cannot be divided by this number of ranks.
        """
        if self.kind != "state":
            return elements
        if self.shards % tp:
            raise LayoutError(
                f"the {self.name} cannot be divided among {tp} tensor-parallel ranks; tp must divide {self.shards}"
            )
        return (elements - self.whole) // tp + self.whole

    def rows_held(self, tokens: int, block_rows: int) -> int:
        """Return the rows in the blocks that a request keeps: whole blocks, without the blocks before the window.

        >>> Group("sliding", "mha", (0,), dim=64, heads=8, window=128).rows_held(1000, 16)
        144
        """
        if self.kind == "state":
            return 1
        first = 0 if self.window is None else max(tokens - self.window, 0)
        rows = -(-tokens // self.row_tokens)
        return (-(-rows // block_rows) - first // self.row_tokens // block_rows) * block_rows


@dataclass(frozen=True)
class Model:
    """The geometry of one model's caches.

    Attributes:
        name: the name on the command line.
        layers: number of all layers, with or without a cache.
        groups: cache groups, the group with the most bytes first.
        source: source of the numbers.
        verified: whether the numbers were checked against the source; otherwise they are from memory.
        note: a remark for users.
    """

    name: str
    layers: int
    groups: tuple[Group, ...]
    source: str
    verified: bool = False
    note: str = ""


@cache
def models() -> dict[str, Model]:
    """Return every model of ``models.toml`` by name, in the order of the file.

    >>> models()["llama-3.1-70b"].groups[0].heads
    8
    """
    return {entry["name"]: _model(entry) for entry in table("models.toml")["model"]}


def find_model(name: str) -> Model:
    """Return the model of this name, in upper or lower case.

    Raises:
        LayoutError: the catalogue has no such model; the message suggests the nearest names.

    >>> find_model("Llama-3.1-8B").layers
    32
    """
    known = models()
    found = known.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"near it: {', '.join(near)}" if near else f"known are {', '.join(known)}"
        raise LayoutError(f"no model {name!r} in the catalogue; {hint}; or give its config.json with --config")
    return found


def config_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the keys that config.json files of a model type may leave out, with the defaults of transformers."""
    entries = [entry for entry in table("configs.toml")["default"] if model_type in entry["types"]]
    return {key: value for entry in entries for key, value in entry.items() if key != "types"}


@cache
def table(name: str) -> dict[str, Any]:
    """Return a file of the catalogue."""
    return tomllib.loads(files("kvplan.catalogue").joinpath(name).read_text(encoding="utf-8"))


def _model(entry: Mapping[str, Any]) -> Model:
    count, tables = entry["layers"], entry["groups"]
    first, pattern = entry.get("first", []), entry.get("pattern", [])
    named = [*first, *islice(cycle(pattern), max(count - len(first), 0))][:count]
    groups = []
    for name, table in tables.items():
        rest = dict(table)
        of = rest.pop("like", name)
        layers = tuple(k for k in range(count) if named[k] == of) if of in named else tuple(range(count))
        packed = tuple(rest.pop("packed", {}).items())
        groups.append(Group(name, rest.pop("kind", "mha"), layers, packed=packed, **rest))
    facts = {key: entry[key] for key in ("source", "verified", "note") if key in entry}
    return Model(entry["name"], count, tuple(groups), **facts)
