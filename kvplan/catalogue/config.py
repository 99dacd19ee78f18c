"""Read a model's geometry from config.json, the file that Hugging Face stores with the weights.

``configs.toml`` says, for each ``model_type``, which keys are read and which may be left unread. A key that looks
structural and is neither makes an answer unverified.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

from kvplan.base.files import LIMITS, json_of, read_whole
from kvplan.base.values import QUOTED, integer, quoted
from kvplan.catalogue.models import Group, Model, config_defaults, table
from kvplan.errors import LayoutError, bounded

# Keys of the language model's config inside that of a larger model.
NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
ELEMENT_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_UNSET: tuple[Any, ...] = (None, False, 0, "", [], {})
_ELSE = "describe the layout by a spec instead"


class Geometry(NamedTuple):
    """What a config says about the cache.

    Attributes:
        groups: cache groups.
        layers: number of layers, draft layers not counted.
        unread: keys that look structural and are not on the list of the model type; the groups may be wrong.
        note: what else a user should know; empty if nothing.
    """

    groups: tuple[Group, ...]
    layers: int
    unread: tuple[str, ...]
    note: str


def read_config(path: str | Path, *, strict: bool = False) -> Model:
    """Read a config.json, and return the model's geometry.

    Args:
        path: the file. If it has a ``text_config``, as models of images and text have, only that is read; likewise
            ``language_config``, ``llm_config`` and ``thinker_config``.
        strict: whether to refuse a file whose answer would be unverified.

    Raises:
        LayoutError: the file cannot be read, lacks a key, or has an unknown setting; the message names the key.
    """
    try:
        text = read_whole(Path(path))
    except LayoutError as error:
        raise LayoutError(f"cannot read the config {quoted(str(path))}: {error}") from error
    try:
        content = json_of(text)
    except LayoutError as error:
        raise LayoutError(f"{quoted(str(path))} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LayoutError(f"{quoted(str(path))} holds a {type(content).__name__}; a config is a table of keys")
    try:
        groups, layers, unread, note = geometry(content)
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from error
    if strict and unread:
        raise LayoutError(f"{path}: {_unverified(unread)}; without --strict the figures are shown as unverified")
    name = content.get("_name_or_path") or content.get("model_type") or Path(path).stem
    notes = [note] if note else []
    if unread:
        notes.append(f"unverified: {_unverified(unread)}")
    return Model(bounded(name, QUOTED) if isinstance(name, str) else quoted(name), layers, groups, source=str(path),
                 verified=not unread, note="; ".join(notes))  # fmt: skip


def _unverified(unread: Sequence[str]) -> str:
    shown = ", ".join(bounded(key, QUOTED) for key in unread[:8]) + (", ..." if len(unread) > 8 else "")
    return f"not known for this model_type, and may change what the cache holds: {shown}"


def geometry_of(content: Mapping[str, Any]) -> tuple[tuple[Group, ...], int]:
    """Return the cache groups and the number of layers of a model's config.

    Raises:
        LayoutError: a key is missing, or its value is wrong or unknown.

    >>> groups, layers = geometry_of({"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096,
    ...                               "num_key_value_heads": 8})
    >>> groups[0]
    Group(name='full', kind='mha', layers=(0, 1), dim=128, heads=8, window=None, row_tokens=1, dtype=None, part='kv', \
shards=1, packed=(), whole=0)
    """
    return geometry(content)[:2]


def geometry(content: Mapping[str, Any], outer_type: Any = "", depth: int = 0) -> Geometry:
    """Return what a config says about the cache; ``outer_type`` is the model type if the config tells none.

    Raises:
        LayoutError: a key is missing, or its value is wrong or unknown.

    >>> config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096}
    >>> geometry({**config, "kv_share_groups": 4}).unread
    ("'kv_share_groups'",)
    """
    model_type = content.get("model_type")
    model_type = outer_type if model_type is None else model_type
    if not isinstance(model_type, str):
        raise LayoutError(f"'model_type' is {quoted(model_type)}; it is a word")
    inner = next((key for key in NESTED if content.get(key) not in _UNSET), None)
    if inner is None:
        return _Reader(content, model_type).geometry()
    if not isinstance(content[inner], Mapping):
        raise LayoutError(f"its {inner} is {quoted(content[inner])}; it is a table of keys")
    if depth > 1:
        raise LayoutError(f"its {inner} nests configs too deeply; give the config of the language model alone")
    try:
        return geometry(content[inner], model_type, depth + 1)
    except LayoutError as error:
        raise LayoutError(f"in {inner!r}: {error}") from error


class _Family:
    """What ``configs.toml`` says of a model type."""

    def __init__(self, model_type: str) -> None:
        data = table("configs.toml")
        entry = next((one for one in data["family"] if model_type in one["types"]), None)
        self.known = entry is not None
        own = entry or {}
        self.keys = ChainMap(own.get("keys", {}), data["keys"])
        self.kinds = own.get("kinds", data["kinds"])
        self.extra = own.get("extra", data["extra"])
        self.times = own.get("times", 1)
        self.state = own.get("state", "")
        self.defaults = {**own.get("defaults", {}), **config_defaults(model_type)}
        self.ignored = [*data["ignored"], *own.get("ignored", [])]
        self.caches = {name: {**usual, **own.get("caches", {}).get(name, {})} for name, usual in data["cache"].items()}
        self.states, self.words, self.names = data["state"], data["structural"], data["kind_names"]
        self.needs = own.get("needs", ())
        self.refused = [key for key in data["refused"] if key not in own.get("reads", ())]


class _Reader:
    """Reads one config by the data of its model type, and notes which keys it asked for."""

    def __init__(self, content: Mapping[str, Any], model_type: str) -> None:
        self.family, self.model_type = _Family(model_type), model_type
        given = dict(_flat(content))  # a null overrides the default of a class: no layer slides, for instance
        self.config: dict[str, Any] = {k: v for k, v in {**self.family.defaults, **given}.items() if v is not None}
        if self.config.get("use_sliding_window") is False:
            self.config.pop("sliding_window", None)
        self.given, self.asked = given, set[str]()

    # ---- single keys ---------------------------------------------------------------------------------------------

    def get(self, role: str, config: Mapping[str, Any] | None = None) -> Any:
        """Return the value of a role, whose key may have another name in this family; None if it is not set."""
        for key in self._names(role):
            self.asked.add(key)
            value = (config or self.config).get(key)
            if value is not None:
                return value
        return None

    def _names(self, role: str) -> Sequence[str]:
        names: str | list[str] = self.family.keys.get(role, role)
        return [names] if isinstance(names, str) else names

    def integer(self, role: str, config: Mapping[str, Any] | None = None, least: int = 1,
                most: int = LIMITS.number) -> int:  # fmt: skip
        value, key = self.get(role, config), self._names(role)[0]
        if value is None:
            raise LayoutError(f"{key!r} is missing: add it to the config, an integer from {least} to {most}")
        return integer(repr(key), value, least=least, most=most)

    def total(self, terms: Sequence[Sequence[str | int]], config: Mapping[str, Any] | None = None) -> int:
        """Return a sum of products of numbers and roles."""
        return sum(prod(one if isinstance(one, int) else self.integer(one, config) for one in term) for term in terms)

    # ---- the whole -----------------------------------------------------------------------------------------------

    def geometry(self) -> Geometry:
        for key in self.family.refused:
            if self.config.get(key) not in _UNSET:
                raise LayoutError(f"{key!r} is {quoted(self.config[key])}, which changes what the cache holds in a way "
                                  f"that is not understood; {_ELSE}")  # fmt: skip
        for keys in self.family.needs:
            if all(self.get(key) is None for key in keys):
                raise LayoutError(f"{' or '.join(map(repr, keys))} is missing, which tells what differs between layers")
        count = self.get("layers")
        layers = len(count) if isinstance(count, list | str) and count else self.integer("layers", most=LIMITS.layers)
        drafts = 0 if self.get("drafts") is None else self.integer("drafts", least=0, most=LIMITS.layers)
        self.asked.update(self._names("drafts"))
        kinds = [kind for kind in self._kinds(layers, drafts) for _ in range(self.family.times)]
        groups = tuple(group for name in self.family.caches for group in self._groups(name, kinds))
        states = tuple(k for k, kind in enumerate(kinds) if "state" in kind)
        notes = []
        if states:
            groups += (self._state(states),)
        if all(group.kind == "state" for group in groups):
            notes.append("no layer has attention: the model keeps states, and no cache that grows with tokens")
        if drafts:
            key = next(key for key in self._names("drafts") if key in self.config)
            notes.append(f"without the caches of draft layers, of which {key} tells {drafts}")
        return Geometry(groups, len(kinds), tuple(self._unread()), "; ".join(notes))

    def _unread(self) -> Iterator[str]:
        if not self.family.known:
            yield f"'model_type' {quoted(self.model_type)}"
        words = set(self.family.words)
        differing = self.given.get("per_layer_config") or {}
        inner = [item for own in differing.values() for item in own.items()]
        for key, value in dict([*inner, *self.given.items()]).items():
            looks_structural = not words.isdisjoint(key.lower().replace(".", "_").split("_"))
            if not looks_structural or value in _UNSET or key in self.asked:
                continue
            if not any(fnmatch(key, pattern) for pattern in self.family.ignored):
                yield repr(key)

    # ---- which layer keeps what ------------------------------------------------------------------------------------

    def _kinds(self, layers: int, drafts: int) -> list[set[str]]:
        """Return the names of the caches that each layer keeps."""
        base = self._first(self.family.kinds, layers, drafts)
        if base is None:
            if self.family.state:
                keys = ", ".join(repr(one["key"]) for one in self.family.kinds if "key" in one)
                raise LayoutError(f"no key tells which layers hold a state; expected one of {keys}")
            if self.get("window") and self.config.get("use_sliding_window") is not False:
                raise LayoutError(f"'sliding_window' is {quoted(self.get('window'))}, but neither 'layer_types' nor "
                                  "'sliding_window_pattern' tells which layers slide")  # fmt: skip
            base = ["full"] * layers
        if self.get("kv_lora_rank"):
            if "sliding" in base:
                raise LayoutError(f"layers that slide beside 'kv_lora_rank' are not understood; {_ELSE}")
            base = [kind.replace("full", "latent") for kind in base]
        more = self._first(self.family.extra, layers, drafts) or [""] * layers
        named = [f"{kind}+{extra}".split("+") for kind, extra in zip(base, more, strict=True)]
        return [set() if "none" in names else set(names) for names in named]

    def _first(self, selectors: Sequence[Mapping[str, Any]], layers: int, drafts: int) -> list[str] | None:
        """Return the kinds of layers by the first selector whose keys are set."""
        for selector in selectors:
            if all(self.get(key) for key in selector.get("when", ())):
                kinds = self._select(selector, layers, drafts)
                if kinds is not None:
                    self.asked.update(selector.get("settles", ()))
                    return kinds
        return None

    def _select(self, selector: Mapping[str, Any], layers: int, drafts: int) -> list[str] | None:
        key, by = selector.get("key", ""), selector["by"]
        value = self.get(key) if key else None
        if by == "all":
            return [selector["hit"]] * layers
        if value is None or value == []:
            return None
        if by == "list":
            return self._listed(key, value, selector.get("names", self.family.names), layers, drafts)
        if by == "among":
            first = selector.get("first", 0)
            if not isinstance(value, list) or not all(
                isinstance(k, int) and first <= k < layers + first for k in value
            ):
                raise LayoutError(f"{key!r} is {quoted(value)}; it is a list of layers, from {first} to "
                                  f"{layers - 1 + first}")  # fmt: skip
            hits = [k + first in value for k in range(layers)]
        elif by == "from":
            number = self.integer(key, least=0)
            hits = [k >= (layers - number if selector.get("last") else number) for k in range(layers)]
        else:  # every n-th layer
            every = self.integer(key)
            at = selector.get("at", every - 1)
            at = at if isinstance(at, int) else self.integer(at, least=0)
            hits = [k % every == at for k in range(layers)]
        return [selector.get("hit", "full") if hit else selector["miss"] for hit in hits]

    def _listed(self, key: str, value: Any, names: Mapping[str, str], layers: int, drafts: int) -> list[str]:
        if not isinstance(value, list | str) or len(value) not in {layers, layers + drafts}:
            raise LayoutError(f"{key!r} is {quoted(value)}; it is a list of {layers}, one per layer")
        unknown = [one for one in value[:layers] if isinstance(one, list | dict) or str(one) not in names]
        if unknown:
            raise LayoutError(f"{key!r} has {quoted(unknown[0])}; expected one of {', '.join(names)}")
        return [names[str(one)] for one in value[:layers]]

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _groups(self, name: str, kinds: Sequence[set[str]]) -> Iterator[Group]:
        """Yield the groups of one kind of cache: one, or more if its layers differ in size."""
        layers = [k for k, kind in enumerate(kinds) if name in kind]
        if not layers:
            return
        differing = self.get("per_layer_config") or {}
        if not isinstance(differing, dict):
            raise LayoutError(f"'per_layer_config' is {quoted(differing)}; it is a table of layers")
        alike: dict[Group, list[int]] = {}
        whole = self._group(name, self.config) if not differing else None
        for layer in layers:
            own: Any = next((differing[key] for key in (f"{layer:02}", f"{layer}") if key in differing), {})
            if not isinstance(own, dict):
                raise LayoutError(f"'per_layer_config' has {quoted(own)}; it is a table of keys for each layer")
            alike.setdefault(whole or self._group(name, {**self.config, **own}), []).append(layer)
        for group, same in alike.items():
            number = "" if len(alike) == 1 else f"-{group.dim}"
            yield replace(group, name=f"{name}{number}", layers=tuple(same))

    def _group(self, name: str, config: Mapping[str, Any]) -> Group:
        form = self.family.caches[name]
        facts = {key: form[key] for key in ("dtype", "part") if key in form}
        if form["kind"] == "mla":
            dim = self.total(form["dim"], config)
            packed = (("fp8_ds_mla", 656),) if name == "latent" and dim == 576 else ()
            return Group(name, "mla", (), dim=dim, packed=packed, **facts)
        heads = next((role for role in form["heads"] if self.get(role, config) is not None), "queries")
        count = self.integer(heads, config, most=LIMITS.heads)
        role = next((role for role in form["dim"] if self.get(role, config) is not None), None)
        dim = self._divided(config) if role is None else self.integer(role, config)
        for key in form["value_dim"]:
            if (self.get(key, config) or dim) != dim:
                raise LayoutError(f"{key!r} is {quoted(self.get(key, config))} and K has {dim}; rows of K and V of "
                                  "different sizes are not understood here")  # fmt: skip
        window = self.integer(form["window"], config) if "window" in form else None
        return Group(name, "mha", (), dim=dim, heads=count, window=window, **facts)

    def _divided(self, config: Mapping[str, Any]) -> int:
        hidden, queries = self.integer("hidden", config), self.integer("queries", config)
        if hidden % queries:
            raise LayoutError(f"'head_dim' is missing, and 'hidden_size' {hidden} is no multiple of {queries} heads")
        return hidden // queries

    def _state(self, layers: tuple[int, ...]) -> Group:
        """Return the states: a convolution's last inputs in the model's type, and the state in the type of states.

        If a model has one group of heads, each tensor-parallel rank holds that group's part of the inputs whole.
        """
        form = self.family.states.get(self.family.state)
        if form is None:
            raise LayoutError(f"some layers hold a state, and its size is not known for this model_type; {_ELSE}")
        usual = str(self.get("dtype") or "bfloat16")
        dtype = str(self.get("state_dtype") or form.get("dtype", usual))
        for one in (usual, dtype):
            if one not in ELEMENT_NBYTES:
                raise LayoutError(f"states of {quoted(one)}; expected one of {', '.join(ELEMENT_NBYTES)}")
        kept = self.integer(form["kernel"]) - 1 if "kernel" in form else 0
        conv, shared, state = (self.total(form.get(key, ())) for key in ("conv", "shared", "state"))
        shards = self.total(form["shards"])
        groups = self.integer(form["groups"]) if "groups" in form else 0
        if groups > 1:
            shards = gcd(shards, groups)
        inputs, whole = kept * (conv + shared), kept * shared if groups == 1 else 0
        nbytes = (ELEMENT_NBYTES[usual], ELEMENT_NBYTES[dtype])
        if nbytes == (2, 2):
            return Group("state", "state", layers, dim=inputs + state, dtype="bf16", shards=shards, whole=whole)
        return Group("state", "state", layers, dim=inputs * nbytes[0] + state * nbytes[1], dtype="uint8",
                     shards=shards, whole=whole * nbytes[0])  # fmt: skip


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value; keys of a table inside have its name before them, as in ``a.b``."""
    for key, value in content.items():
        yield key, value
        if isinstance(value, Mapping) and key != "per_layer_config":
            yield from ((f"{key}.{deeper}", inner) for deeper, inner in value.items())
