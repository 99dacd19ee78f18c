"""Write and read dumps: the layout of a running engine as JSON text, with addresses and strides, and without data.

A dump has all facts of a layout, but not its bytes. A layout that is read from a dump has the addresses of the engine's
process. So it cannot move bytes in this process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvplan.base.files import write_whole
from kvplan.base.integers import integer
from kvplan.base.limits import LIMITS, Budget
from kvplan.base.quoting import listed, quoted
from kvplan.errors import LayoutError, NotationError
from kvplan.layout.address_ranges import check_bounds
from kvplan.layout.build import part_name
from kvplan.layout.components import INT64_MAX, Built, Component, Form, Region, subblocks_of
from kvplan.layout.consistency import check_dtype, check_told, part_dtype
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.notation import Notation, parse
from kvplan.layout.slicing import heads_held
from kvplan.layout.strides import Factors, extent, normal

NAME, VERSION = "kvplan.layout", 1
SCHEMA = f"{NAME}/{VERSION}"

_AXES = ("layer", "kv", "block", "token", "subblock", "head", "dim")
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:[0-9]{1,9})?")
_LINE = 110  # characters of a line of the file; a value that fits is on one line


def document_of(layout: Built) -> dict[str, Any]:
    """Return a layout as a dict for JSON. Components that share a form are one entry.

    >>> from kvplan import KVLayout
    >>> spec = {"notation": "layer: block token dim", "sizes": {"layer": 80, "block": 9, "token": 4, "dim": 8}}
    >>> made = document_of(KVLayout.from_spec(spec).built)
    >>> made["schema"], len(made["components"]), made["components"][0]["token"]
    ('kvplan.layout/1', 1, [[4, 16]])
    """
    order = {part: k for k, part in enumerate(layout.parts)}
    forms: dict[Form, dict[tuple[str, str | None], list[Component]]] = {}
    for component in sorted(layout.components, key=lambda c: (c.layer, order[c.part])):
        dtype = component.dtype if component.dtype != layout.dtype else None  # merged layouts have several
        forms.setdefault(component.form, {}).setdefault((component.part, dtype), []).append(component)
    return {
        "schema": SCHEMA,
        "notation": layout.notation,
        "sizes": dict(layout.sizes),
        "dtype": layout.dtype,
        "itemsize": ITEMSIZE.get(layout.dtype),
        "num_blocks": layout.num_blocks,
        "block_tokens": layout.block_tokens,
        "parts": list(layout.parts),
        "virtual": layout.virtual,
        "regions": [
            {
                "address": region.address,
                "nbytes": region.nbytes,
                "device": region.device,
                "pinned": region.pinned,
                "writable": region.writable,
                "seams": list(region.seams),
            }
            for region in layout.regions
        ],
        "components": [_group(form, held) for form, held in forms.items()],
    }


def _group(form: Form, held: Mapping[tuple[str, str | None], Sequence[Component]]) -> dict[str, Any]:
    return {
        **{axis: [list(factor) for factor in getattr(form, axis)] for axis in ("block", "token", "head", "dim")},
        "head_start": form.head_start,
        "headed": form.headed,
        "opaque": form.opaque,
        "table": None if form.table is None else list(form.table),
        "held": [
            {"part": part, "layers": [c.layer for c in some], "addresses": [c.address for c in some]}
            | ({} if dtype is None else {"dtype": dtype})
            for (part, dtype), some in held.items()
        ],
    }


def text_of(layout: Built) -> str:
    """Return the text of a dump's file: JSON, with each short value on one line."""
    lines: list[str] = []
    _write_lines(document_of(layout), 0, lines)
    return "".join(lines) + "\n"


def _write_lines(value: Any, depth: int, out: list[str]) -> None:
    nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, list | dict) for item in value)
    )
    if not value or not nested or len(value) < _LINE:  # more items cannot fit on a line
        flat = json.dumps(value)
        if not value or not nested or len(flat) + 2 * depth <= _LINE:
            out.append(flat)
            return
    brackets, pad = "{}" if isinstance(value, dict) else "[]", "  " * (depth + 1)
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    out.append(brackets[0])
    for k, (key, item) in enumerate(items):
        out.append(f"{',' * (k > 0)}\n{pad}" + (f"{json.dumps(key)}: " if key is not None else ""))
        _write_lines(item, depth + 1, out)
    out.append(f"\n{'  ' * depth}{brackets[1]}")


def save(layout: Built, path: str | os.PathLike[str]) -> None:
    """Write a dump, completely or not at all; see :meth:`kvplan.KVLayout.save`."""
    if not isinstance(path, str | os.PathLike):
        raise LayoutError(f"path is {quoted(path)}; give the file to write the dump to")
    target = Path(path)
    try:
        write_whole(target, text_of(layout).encode())
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise LayoutError(f"cannot write the dump {quoted(str(target))}: {error}") from error


def built_from_dump(dump: Mapping[str, Any], budget: Budget | None = None) -> Built:
    """Return the layout that a dump describes.

    Args:
        dump: content of the file.
        budget: limits of the work for the whole document that contains the dump.

    Raises:
        LayoutError: a value is missing, wrong or too large (:mod:`kvplan.base.limits`), values contradict each other,
            or the schema is not known.
    """
    budget = budget or Budget()
    _check_schema(dump["schema"])
    notations = _notations(_need(dump, "notation", "the dump"))
    sizes = _sizes(_need(dump, "sizes", "the dump"))
    dtype, itemsizes = check_dtype(_need(dump, "dtype", "the dump"), dump.get("itemsize"))
    num_blocks = _integer(dump, "num_blocks", "", least=1)
    block_tokens = _integer(dump, "block_tokens", "", least=1, most=LIMITS.block_tokens)
    if sizes.get("block", num_blocks) != num_blocks:
        raise LayoutError(f"sizes say block={sizes['block']}, num_blocks says {num_blocks}")
    virtual = "virtual" in dump and _flag(dump, "virtual", "the dump")  # saved from a spec
    regions = tuple(
        _region(entry, f"regions[{k}]", virtual=virtual)
        for k, entry in enumerate(_listed(dump, "regions", "", least=1))
    )
    if len({(region.address, region.nbytes) for region in regions}) < len(regions):
        raise LayoutError("regions hold one allocation twice; list each once")
    devices = sorted({region.device for region in regions})
    if len(devices) > 1:
        raise LayoutError(f"regions are on {listed(devices)}; a layout lives on one device")
    order = _parts(_listed(dump, "parts", "", least=1))
    components: list[Component] = []
    for k, entry in enumerate(_listed(dump, "components", "", least=1)):
        components += _components(
            entry, f"components[{k}]", num_blocks, block_tokens, budget, dtype, subblocked="subblock" in sizes
        )
    budget.use("components", len({(component.layer, component.part) for component in components}))
    components = _in_order(components, order)
    heads_held(components)
    check_told(notations, sizes, components, dtype=dtype, itemsizes=itemsizes)
    if any(not component.form.opaque for component in components):
        if sizes.get("token", block_tokens) != block_tokens:
            raise LayoutError(f"sizes say token={sizes['token']}, block_tokens says {block_tokens}")
    elif block_tokens != subblocks_of(components):
        raise LayoutError(f"block_tokens is {block_tokens}; blocks without token slots count their sub-blocks")
    check_bounds(components, regions)
    check_disjoint(components, budget)
    notation = " + ".join(map(str, notations))
    return Built(tuple(components), regions, num_blocks, block_tokens, sizes, dtype, notation)


def _parts(names: Sequence[Any]) -> dict[str, int]:
    """Return the position of every part in the dump's order."""
    order = {_part(name, f"parts[{k}]"): k for k, name in enumerate(names)}
    if len(order) < len(names):
        raise LayoutError("parts name one twice")
    return order


def _in_order(components: Sequence[Component], order: Mapping[str, int]) -> list[Component]:
    """Sort components by layer, part and first head; share equal forms; refuse repeated and missing components."""
    seen: set[tuple[int, str, int]] = set()
    for component in components:
        if component.part not in order:
            raise LayoutError(f"{component} is not among parts {listed(order)}")
        key = (component.layer, component.part, component.form.head_start)
        if key in seen:
            raise LayoutError(f"{component} is there twice")
        seen.add(key)
    held = {component.part for component in components}
    if lacked := [part for part in order if part not in held]:
        raise LayoutError(f"parts name {quoted(lacked[0])}, and no component holds it")
    shared: dict[Form, Form] = {}
    alike = [Component(c.layer, c.part, c.address, shared.setdefault(c.form, c.form), c.dtype) for c in components]
    return sorted(alike, key=lambda c: (c.layer, order[c.part], c.form.head_start))


def _check_schema(schema: Any) -> None:
    name, slash, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if name != NAME or not slash or not re.fullmatch(r"[1-9][0-9]{0,8}", version):
        raise LayoutError(f"schema is {quoted(schema)}; layout.save() writes {SCHEMA!r}")
    if int(version) > VERSION:
        raise LayoutError(f"schema {quoted(schema)} is newer than this kvplan, which reads {SCHEMA!r}; upgrade kvplan")


def _notations(text: Any) -> list[Notation]:
    """Parse the notation of a dump; merged layouts have several notations."""
    if not isinstance(text, str):
        raise LayoutError(f"notation is {quoted(text)}; give a text")
    if len(text) > LIMITS.notation_length:
        raise LayoutError(f"notation has {len(text):,} characters; it has at most {LIMITS.notation_length:,}")
    try:
        return [parse(one) for one in text.split(" + ")]
    except NotationError as error:
        raise LayoutError(f"notation is {quoted(text)}: {str(error).splitlines()[0]}") from error


def _sizes(sizes: Any) -> dict[str, int]:
    if not isinstance(sizes, Mapping):
        raise LayoutError(f"sizes is {quoted(sizes)}; it is a table of extents by axis")
    for axis in sizes:
        if axis not in _AXES:
            raise LayoutError(f"sizes name {quoted(axis)}; axes are {', '.join(_AXES)}")
    return {axis: _integer(sizes, axis, "sizes.", least=1) for axis in sizes}


def _region(entry: Any, where: str, *, virtual: bool) -> Region:
    _table(entry, where)
    address, nbytes = _integer(entry, "address", f"{where}."), _integer(entry, "nbytes", f"{where}.", least=1)
    if address + nbytes > INT64_MAX:
        raise LayoutError(f"{where} ends at {address + nbytes:#x}, past the largest int64 address")
    device = _need(entry, "device", where)
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise LayoutError(f"{where}.device is {quoted(device)}; it is a name as 'cpu' or 'cuda:0'")
    seams = _integers(entry, "seams", where, least=address, most=address + nbytes)
    pinned, writable = _flag(entry, "pinned", where), _flag(entry, "writable", where)
    marks = tuple(sorted(set(seams)))
    return Region(address, nbytes, device, pinned, writable, virtual, marks, recorded=not virtual)


def _components(
    entry: Any, where: str, num_blocks: int, block_tokens: int, budget: Budget, dtype: str, *, subblocked: bool
) -> Iterator[Component]:
    form = _form(entry, where, num_blocks, block_tokens, subblocked=subblocked)
    for k, held in enumerate(_listed(entry, "held", f"{where}.", least=1)):
        place = f"{where}.held[{k}]"
        _table(held, place)
        part = _part(_need(held, "part", place), f"{place}.part")
        layers, addresses = (_integers(held, key, place) for key in ("layers", "addresses"))
        if len(layers) != len(addresses) or not layers:
            raise LayoutError(f"{place} has {len(layers)} layers and {len(addresses)} addresses; they go together")
        budget.use("views", len(layers))
        own = part_dtype(held.get("dtype"), dtype, place)
        for layer, address in zip(layers, addresses, strict=True):
            yield Component(layer, part, address, form, own)


def _form(entry: Any, where: str, num_blocks: int, block_tokens: int, *, subblocked: bool) -> Form:
    _table(entry, where)
    table = None
    if _need(entry, "table", where) is not None:
        table = tuple(_integers(entry, "table", where, least=-INT64_MAX))
        if len(table) != num_blocks or table[0] != 0:
            raise LayoutError(
                f"{where}.table has {len(table)} entries; it is the bytes from block 0 to each of {num_blocks} blocks"
            )
    block, token, head, dim = (_factors(entry, axis, where) for axis in ("block", "token", "head", "dim"))
    form = Form(
        *(block, token, head, dim),
        head_start=_integer(entry, "head_start", f"{where}.", most=LIMITS.number),
        headed=_flag(entry, "headed", where),
        opaque=_flag(entry, "opaque", where),
        table=table,
    )
    wanted = 1 if table is not None else num_blocks
    tokens = (None if subblocked else 1) if form.opaque else block_tokens
    for axis, count in (("block", wanted), ("token", tokens), ("head", None if form.headed else 1)):
        held = extent(getattr(form, axis))
        if count is not None and held != count:
            raise LayoutError(f"{where}.{axis} has {quoted(held)} coordinates; the dump says {count}")
    if form.opaque and block_tokens % form.subblocks:
        raise LayoutError(
            f"{where}.token has {quoted(form.subblocks)} sub-blocks; they divide block_tokens, {block_tokens}"
        )
    if extent(form.head) > min(LIMITS.heads, LIMITS.number + 1 - form.head_start):
        raise LayoutError(
            f"{where} has {quoted(extent(form.head))} heads from number {form.head_start}; there are at most "
            f"{LIMITS.heads:,}, and the largest number is {LIMITS.number}"
        )
    if extent(form.dim) > INT64_MAX:
        raise LayoutError(f"{where}.dim has {quoted(extent(form.dim))} bytes, more than any memory")
    return form


def _factors(entry: Mapping[str, Any], axis: str, where: str) -> Factors:
    factors = []
    for k, factor in enumerate(_listed(entry, axis, f"{where}.")):
        place = f"{where}.{axis}[{k}]"
        if not isinstance(factor, Sequence) or isinstance(factor, str) or len(factor) != 2:
            raise LayoutError(f"{place} is {quoted(factor)}; it is [extent, stride in bytes]")
        count, stride = (
            integer(f"{place}[{j}]", number, least=1 - j, most=INT64_MAX) for j, number in enumerate(factor)
        )
        factors.append((count, stride))
    return normal(factors)


def _part(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise LayoutError(f"{where} is {quoted(value)}; it is the name of a part")
    return part_name(value)


def _need(entry: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in entry:
        raise LayoutError(f"{where} lacks {key!r}; layout.save() writes it")
    return entry[key]


def _table(entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise LayoutError(f"{where} is {quoted(entry)}; it is a table of keys")


def _listed(entry: Mapping[str, Any], key: str, where: str, least: int = 0) -> Sequence[Any]:
    value = _need(entry, key, where.rstrip(".") or "the dump")
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < least:
        raise LayoutError(f"{where}{key} is {quoted(value)}; it is a list of at least {least}")
    return value


def _integers(entry: Mapping[str, Any], key: str, where: str, least: int = 0, most: int = INT64_MAX) -> list[int]:
    found = _listed(entry, key, f"{where}.")
    return [integer(f"{where}.{key}[{k}]", number, least=least, most=most) for k, number in enumerate(found)]


def _integer(entry: Mapping[str, Any], key: str, where: str, least: int = 0, most: int = INT64_MAX) -> int:
    return integer(f"{where}{key}", _need(entry, key, where.rstrip(".") or "the dump"), least=least, most=most)


def _flag(entry: Mapping[str, Any], key: str, where: str) -> bool:
    value = _need(entry, key, where)
    if not isinstance(value, bool):
        raise LayoutError(f"{where}.{key} is {quoted(value)}; it is true or false")
    return value
