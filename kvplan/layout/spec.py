"""Read and write layouts as plain documents: specs, and dumps.

A spec has a notation and sizes; its addresses are made up. A dump has the addresses, strides and facts of a real
layout, and no data: a layout that is read from it cannot move bytes, because its addresses are another process's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from kvplan.base.files import LIMITS, Budget, json_of, read_whole, toml_of, write_whole
from kvplan.base.values import integer, integers, listed, quoted
from kvplan.errors import LayoutError, NotationError
from kvplan.layout.address_ranges import check_bounds, merged
from kvplan.layout.build import Naming, assemble, extents, part_name, shape_of
from kvplan.layout.components import INT64_MAX, Built, Component, Form, Region, quoted_address, subblocks_of
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.kinds import sizes
from kvplan.layout.notation import AXES, notations, parse
from kvplan.layout.slicing import heads_held, merge
from kvplan.layout.strides import extent, normal
from kvplan.layout.tensors import ITEMSIZE, TensorFacts, contiguous

NAME, VERSION = "kvplan.layout", 1
SCHEMA = f"{NAME}/{VERSION}"

# Separate tensors of a spec begin at multiples of this number of bytes, as tensors of a GPU allocator do.
TENSOR_ALIGNMENT = 2 << 20
DEVICE_BASE = {"cuda": 0x7F00_0000_0000}
HOST_BASE = 0x7E00_0000_0000

_DEVICE = re.compile(r"([a-z][a-z0-9_]*)(:[0-9]{1,9})?")
_KINDS = ("cpu", "cuda", "hip", "xpu", "npu", "tpu", "mps")  # a spec written by hand has typing errors
_KEYS = frozenset((
    "address", "device", "dtype", "head_start", "layer_start", "layers", "name", "notation", "part", "seams", "sizes",
    "strides",
))  # fmt: skip
_FACTORS = ("block", "token", "head", "dim")
_REGION = ("address", "nbytes", "device", "pinned", "writable", "seams")


def built_from_spec(spec: str | Path | Mapping[str, Any], budget: Budget | None = None) -> Built:
    """Return the layout that a spec or a dump describes; see :meth:`kvplan.KVLayout.from_spec`.

    Args:
        spec: path of a file, or its content.
        budget: limits of the work for the whole document that contains the spec.
    """
    content, budget = _load(spec), budget or Budget()
    if "layouts" in content:
        return _side_by_side(content, budget)
    if "schema" not in content:
        return _from_spec(content, budget)
    try:
        return built_from_dump(content, budget)
    except LayoutError as error:
        if isinstance(spec, Mapping):
            raise
        raise LayoutError(f"{quoted(str(spec))}: {error}") from error


def _load(spec: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(spec, Mapping):
        return spec
    if not isinstance(spec, str | Path):
        raise LayoutError(f"a spec is a file or a mapping, not {quoted(spec)}")
    path, why = Path(spec), ""
    try:
        text = read_whole(path)
        is_json = path.suffix == ".json" or text.startswith("{")  # a dump, whatever its suffix
        why = f", which is not {'JSON' if is_json else 'TOML'}"
        content = json_of(text) if is_json else toml_of(text)
    except LayoutError as error:
        raise LayoutError(f"cannot read the spec {quoted(str(path))}{why}: {error}") from error
    if not isinstance(content, dict):
        raise LayoutError(f"{quoted(str(path))} holds a {type(content).__name__}; a spec is a table of keys")
    return content


# ---- values ----------------------------------------------------------------------------------------------------------


def _whole(entry: Mapping[str, Any], key: str, least: int = 0, most: int = INT64_MAX) -> int:
    return integer(key, entry[key], least=least, most=most)


def _wholes(entry: Mapping[str, Any], key: str, least: int = 0, most: int = INT64_MAX) -> tuple[int, ...]:
    return tuple(integer(key, number, least=least, most=most) for number in entry[key])


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise LayoutError(f"{quoted(value)} is neither true nor false")
    return value


def _number(spec: Mapping[str, Any], key: str, default: int, most: int = INT64_MAX) -> int:
    return integer(f"spec {key!r}", spec.get(key, default), least=0, most=most)


def _sequence(spec: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    if not isinstance(spec[key], Sequence) or isinstance(spec[key], str):
        raise LayoutError(f"spec {key!r} is {quoted(spec[key])}; it is a list of integers")
    return tuple(spec[key])


# ---- specs -----------------------------------------------------------------------------------------------------------


def _side_by_side(content: Mapping[str, Any], budget: Budget) -> Built:
    """Merge the entries of ``layouts``. An entry without an address begins after all earlier entries on its device."""
    several = content["layouts"]
    if not isinstance(several, Sequence) or isinstance(several, str) or not several:
        raise LayoutError(f"'layouts' is {quoted(several)}; it is a list of at least one spec")
    budget.use("a list")
    if unknown := sorted(map(quoted, set(content) - {"layouts", "name"})):
        raise LayoutError(f"spec has {unknown[0]} beside 'layouts'; give it in each entry")
    free: dict[object, int] = {}
    layouts: list[Built] = []
    for k, entry in enumerate(several):
        if not isinstance(entry, Mapping):
            raise LayoutError(f"layouts[{k}] is {quoted(entry)}; each entry is a spec, a table of keys")
        device = str(entry.get("device", "cpu"))
        start = {"address": free[device]} if device in free and "address" not in entry else {}
        layouts.append(built_from_spec({**entry, **start}, budget))
        end = max(region.end for region in layouts[-1].regions)
        free[device] = max(free.get(device, 0), -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT)
    built = merge(layouts, budget)
    if not all(region.virtual for region in built.regions):
        return built
    # Entries whose addresses interleave, such as the parts of one page, share memory.
    memory = merged(((region.address, region.end) for region in built.regions), apart=0)
    seams = sorted({seam for region in built.regions for seam in region.seams})
    return built._replace(regions=tuple(
        replace(built.regions[0], address=start, nbytes=end - start, seams=tuple(s for s in seams if start <= s <= end))
        for start, end in memory
    ))  # fmt: skip


def _from_spec(spec: Mapping[str, Any], budget: Budget) -> Built:
    if unknown := sorted(map(quoted, set(spec) - _KEYS)):
        raise LayoutError(f"spec has unknown key {unknown[0]}; keys are {', '.join(sorted(_KEYS))}")
    for key, kind in (("notation", str), ("sizes", Mapping)):
        if not isinstance(spec.get(key), kind):
            raise LayoutError(f"spec needs {key!r}; got {quoted(spec.get(key))}")
    budget.use("a letter", len(spec["notation"]))
    notation = parse(spec["notation"])
    known = extents(notation, spec["sizes"])
    dtype = spec.get("dtype", "bfloat16")
    itemsize = ITEMSIZE.get(dtype) if isinstance(dtype, str) else None
    if itemsize is None:
        raise LayoutError(f"dtype {quoted(dtype)} is unknown; one of {', '.join(sorted(ITEMSIZE))}")
    for axis, what in (("head", "a head"), ("token", "a token slot")):  # coordinates that are visited one by one
        budget.use(what, prod(known[str(atom)] for atom in notation.factors(axis)))
    nested = {axis: known[axis] for axis in notation.nesting}
    Budget().use("a layer and part", known.get("layer", 1) * known.get("kv", 1))  # checked before tensors are made
    budget.use("a tensor", prod(nested.values()))
    tensors = _placed(spec, prod(nested.values()), shape_of(notation, known), itemsize, dtype)
    layers = _sequence(spec, "layers") if "layers" in spec else _number(spec, "layer_start", 0, LIMITS.number)
    naming = Naming(layers, _number(spec, "head_start", 0, LIMITS.number), part_name(spec.get("part", "kv")))
    seams = _sequence(spec, "seams") if "seams" in spec else ()
    built = assemble(notation, tensors, nested, known, naming, seams, budget)
    if "dtype" in spec:
        return built
    components = tuple(replace(component, dtype="") for component in built.components)  # only their bytes are known
    return built._replace(components=components)


def _placed(
    spec: Mapping[str, Any], count: int, shape: tuple[int, ...], itemsize: int, dtype: str
) -> list[TensorFacts]:
    """Return tensors of made-up addresses; they never touch, so that their copies do not merge."""
    strides = contiguous(shape, itemsize)
    if spec.get("strides") is not None:
        given, right = spec["strides"], f"give {len(shape)} integers, in elements, one a dim"
        if not isinstance(given, Sequence) or len(given) != len(shape):
            raise LayoutError(f"spec 'strides' is {quoted(given)}; {right}")
        strides = tuple(stride * itemsize for stride in integers("spec 'strides'", given, right=right))
    device = spec.get("device", "cpu")
    kind = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if kind is None or kind[1] not in _KINDS:
        raise LayoutError(f"device is {quoted(device)}; write 'cpu', or a kind of GPU as 'cuda' or 'cuda:0'")
    address = _number(spec, "address", DEVICE_BASE.get(kind[1], HOST_BASE))
    nbytes = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + itemsize
    step = (nbytes // TENSOR_ALIGNMENT + 1) * TENSOR_ALIGNMENT
    if address + count * step > INT64_MAX:
        tensors = f"{count} tensors of {quoted(nbytes)} bytes from {quoted_address(address)}"
        raise LayoutError(f"{tensors} pass the largest int64 address")
    return [
        TensorFacts(at, shape, strides, itemsize, dtype, Region(at, nbytes, device, virtual=True))
        for at in range(address, address + count * step, step)
    ]


# ---- dumps -----------------------------------------------------------------------------------------------------------


def document_of(layout: Built) -> dict[str, Any]:
    """Return a layout as a dict for JSON. Components that share a form are one entry.

    >>> from kvplan import KVLayout
    >>> spec = {"notation": "layer: block token dim", "sizes": {"layer": 80, "block": 9, "token": 4, "dim": 8}}
    >>> made = document_of(KVLayout.from_spec(spec).built)
    >>> made["schema"], len(made["components"]), made["components"][0]["token"]
    ('kvplan.layout/1', 1, [[4, 16]])
    """
    order = {part: k for k, part in enumerate(layout.parts)}
    forms: dict[Form, dict[tuple[str, str], list[Component]]] = {}
    for component in sorted(layout.components, key=lambda c: (c.layer, order[c.part])):
        forms.setdefault(component.form, {}).setdefault((component.part, component.dtype), []).append(component)
    return {
        "schema": SCHEMA,
        "notation": layout.notation,
        "sizes": sizes(layout),
        "dtype": layout.dtype,
        "itemsize": ITEMSIZE.get(layout.dtype),
        "num_blocks": layout.num_blocks,
        "block_tokens": layout.block_tokens,
        "parts": list(layout.parts),
        "virtual": layout.virtual,
        "regions": [{name: _plain(getattr(region, name)) for name in _REGION} for region in layout.regions],
        "components": [
            {
                **{
                    name: _plain(getattr(form, name)) for name in (*_FACTORS, "head_start", "headed", "opaque", "table")
                },
                "held": [
                    {"part": part, "layers": [c.layer for c in some], "addresses": [c.address for c in some]}
                    | ({} if dtype == layout.dtype else {"dtype": dtype})  # merged layouts have several
                    for (part, dtype), some in held.items()
                ],
            }
            for form, held in forms.items()
        ],
    }


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def text_of(layout: Built) -> str:
    """Return the text of a dump's file: JSON, with a line for each fact, region and group of components."""
    lines = []
    for key, value in document_of(layout).items():
        several = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]" if several else json.dumps(value)
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(layout: Built, path: str | os.PathLike[str]) -> None:
    """Write a dump, completely or not at all; see :meth:`kvplan.KVLayout.save`."""
    if not isinstance(path, str | os.PathLike):
        raise LayoutError(f"path is {quoted(path)}; give the file to write the dump to")
    try:
        write_whole(Path(path), text_of(layout).encode())
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise LayoutError(f"cannot write the dump {quoted(str(path))}: {error}") from error


def built_from_dump(dump: Mapping[str, Any], budget: Budget | None = None) -> Built:
    """Return the layout that a dump describes.

    Args:
        dump: content of the file.
        budget: limits of the work for the whole document that contains the dump.

    Raises:
        LayoutError: a value is missing, wrong or too large (:mod:`kvplan.base.files`), components overlap or lie
            outside their allocations, or the schema is not known.
    """
    schema = re.fullmatch(rf"{NAME}/([1-9][0-9]{{0,8}})", str(dump["schema"]))
    if schema is None:
        raise LayoutError(f"schema is {quoted(dump['schema'])}; layout.save() writes {SCHEMA!r}")
    if int(schema[1]) > VERSION:
        raise LayoutError(f"schema {schema[0]!r} is newer than this kvplan, which reads {SCHEMA!r}; upgrade kvplan")
    try:
        return _from_dump(dump, budget or Budget())
    except LayoutError:
        raise
    except NotationError as error:
        raise LayoutError(f"notation: {error.one_line}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else quoted(str(error))
        raise LayoutError(f"a value of the dump is missing or wrong: {what}; layout.save() writes dumps") from None


def _from_dump(dump: Mapping[str, Any], budget: Budget) -> Built:
    texts = dump["notation"], dump["dtype"]
    budget.use("a letter", sum(map(len, texts)))
    if not all(text.isprintable() for text in texts):
        raise LayoutError("notation and dtype are texts that can be printed")
    notations(texts[0])
    told = {axis: _whole(dump["sizes"], axis, 1) for axis in dump["sizes"]}
    if unknown := sorted(set(told) - set(AXES)):
        raise LayoutError(f"sizes name {quoted(unknown[0])}; axes are {', '.join(AXES)}")
    blocks, tokens = _whole(dump, "num_blocks", 1), _whole(dump, "block_tokens", 1)
    virtual = _flag(dump.get("virtual", False))  # saved from a spec
    regions = tuple(_region(entry, virtual=virtual) for entry in dump["regions"])
    if len({(region.address, region.nbytes) for region in regions}) < len(regions):
        raise LayoutError("regions hold one allocation twice; list each once")
    if len(devices := sorted({region.device for region in regions})) != 1:
        raise LayoutError(f"regions are on {listed(devices)}; a layout lives on one device")
    order = {part_name(name): k for k, name in enumerate(dump["parts"])}
    components: list[Component] = []
    forms: dict[Form, Form] = {}
    for entry in dump["components"]:
        form = _form(entry, blocks, tokens, subblocked="subblock" in told)
        budget.use("a head", extent(form.head))
        budget.use("a token slot", extent(form.token))
        components += _components(entry["held"], forms.setdefault(form, form), texts[1], budget)
    budget.use("a layer and part", len({(component.layer, component.part) for component in components}))
    if {component.part for component in components} != set(order):
        raise LayoutError(f"parts are {listed(order)}, and the components hold others")
    components.sort(key=lambda c: (c.layer, order[c.part], c.form.head_start))
    heads_held(components)
    if all(c.form.opaque for c in components) and tokens != subblocks_of(components):
        raise LayoutError(f"block_tokens is {tokens}; blocks without token slots count their sub-blocks")
    check_bounds(components, regions)
    check_disjoint(components, budget)
    return Built(tuple(components), regions, blocks, tokens, texts[1], " ".join(texts[0].split()))


def _region(entry: Mapping[str, Any], *, virtual: bool) -> Region:
    address, nbytes = _whole(entry, "address"), _whole(entry, "nbytes", 1)
    if address + nbytes > INT64_MAX:
        raise LayoutError(f"a region ends at {address + nbytes:#x}, past the largest int64 address")
    if not _DEVICE.fullmatch(device := entry["device"]):
        raise LayoutError(f"device is {quoted(device)}; it is a name as 'cpu' or 'cuda:0'")
    seams = tuple(sorted(set(_wholes(entry, "seams", address, address + nbytes))))
    pinned, writable = _flag(entry["pinned"]), _flag(entry["writable"])
    return Region(address, nbytes, device, pinned, writable, virtual, seams, recorded=not virtual)


def _components(several: Sequence[Any], form: Form, dtype: str, budget: Budget) -> Iterator[Component]:
    for held in several:
        part, layers, addresses = part_name(held["part"]), _wholes(held, "layers"), _wholes(held, "addresses")
        budget.use("an address", len(layers))
        own = held.get("dtype", "" if " + " in dtype else dtype)
        if own not in ("", *dtype.split(" + ")):
            raise LayoutError(f"dtype is {quoted(own)}; the layout's dtype is {quoted(dtype)}")
        for layer, address in zip(layers, addresses, strict=True):
            yield Component(layer, part, address, form, own)


def _form(entry: Mapping[str, Any], blocks: int, tokens: int, *, subblocked: bool) -> Form:
    block, token, head, dim = (
        normal(
            (integer("an extent", count, least=1, most=INT64_MAX), integer("a stride", stride, least=0, most=INT64_MAX))
            for count, stride in entry[axis]
        )
        for axis in _FACTORS
    )
    table = None if entry["table"] is None else _wholes(entry, "table", -INT64_MAX)
    head_start = _whole(entry, "head_start", most=LIMITS.number)
    form = Form(block, token, head, dim, head_start, _flag(entry["headed"]), _flag(entry["opaque"]), table)
    if table is not None and (len(table) != blocks or table[0] != 0):
        raise LayoutError(f"a table has {len(table)} entries; it is the bytes from block 0 to each of {blocks} blocks")
    slots = (None if subblocked else 1) if form.opaque else tokens
    for axis, count in (("block", 1 if table else blocks), ("token", slots), ("head", None if form.headed else 1)):
        if count is not None and extent(getattr(form, axis)) != count:
            raise LayoutError(f"a component has {quoted(extent(getattr(form, axis)))} of axis {axis}, not {count}")
    if form.opaque and tokens % form.subblocks:
        raise LayoutError(f"{form.subblocks} sub-blocks do not divide block_tokens, {tokens}")
    if extent(head) > LIMITS.number + 1 - head_start:
        heads = f"{quoted(extent(head))} heads from number {head_start}"
        raise LayoutError(f"{heads}; the largest number is {LIMITS.number}")
    if extent(dim) > INT64_MAX:
        raise LayoutError(f"a row has {quoted(extent(dim))} bytes, more than any memory")
    return form
