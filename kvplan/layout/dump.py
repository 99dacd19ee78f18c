"""Write and read dumps: the layout of a running engine as JSON text, with addresses and strides, and without data.

A dump has all facts of a layout, but not its bytes. A layout that is read from a dump has the addresses of the engine's
process. So it cannot move bytes in this process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvplan.base.files import LIMITS, Budget, write_whole
from kvplan.base.values import integer, listed, quoted
from kvplan.errors import LayoutError, NotationError
from kvplan.layout.address_ranges import check_bounds
from kvplan.layout.build import part_name
from kvplan.layout.components import INT64_MAX, Built, Component, Form, Region, subblocks_of
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.kinds import sizes
from kvplan.layout.notation import AXES, parse
from kvplan.layout.slicing import heads_held
from kvplan.layout.strides import Factors, extent, normal

NAME, VERSION = "kvplan.layout", 1
SCHEMA = f"{NAME}/{VERSION}"

_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:[0-9]{1,9})?")


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
        "sizes": sizes(layout),
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
        LayoutError: a value is missing, wrong or too large (:mod:`kvplan.base.files`), components overlap or lie
            outside their allocations, or the schema is not known.
    """
    _check_schema(dump["schema"])
    try:
        return _built(dump, budget or Budget())
    except LayoutError:
        raise
    except NotationError as error:
        raise LayoutError(f"notation: {error.one_line}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else quoted(str(error))
        raise LayoutError(f"a value of the dump is missing or wrong: {what}; layout.save() writes dumps") from None


def _built(dump: Mapping[str, Any], budget: Budget) -> Built:
    texts = dump["notation"], dump["dtype"]
    budget.use("a letter", sum(map(len, texts)))
    if not all(text.isprintable() for text in texts):
        raise LayoutError("notation and dtype are texts that can be printed")
    notation = " + ".join(str(parse(one)) for one in texts[0].split(" + "))
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
    for entry in dump["components"]:
        form = _form(entry, blocks, tokens, subblocked="subblock" in told)
        budget.use("a head", extent(form.head))
        budget.use("a token slot", extent(form.token))
        components += _components(entry["held"], form, texts[1], budget)
    budget.use("a layer and part", len({(component.layer, component.part) for component in components}))
    if {component.part for component in components} != set(order):
        raise LayoutError(f"parts are {listed(order)}, and the components hold others")
    forms: dict[Form, Form] = {}
    components = [replace(c, form=forms.setdefault(c.form, c.form)) for c in components]
    components.sort(key=lambda c: (c.layer, order[c.part], c.form.head_start))
    heads_held(components)
    if all(c.form.opaque for c in components) and tokens != subblocks_of(components):
        raise LayoutError(f"block_tokens is {tokens}; blocks without token slots count their sub-blocks")
    check_bounds(components, regions)
    check_disjoint(components, budget)
    return Built(tuple(components), regions, blocks, tokens, texts[1], notation)


def _check_schema(schema: Any) -> None:
    name, slash, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if name != NAME or not slash or not re.fullmatch(r"[1-9][0-9]{0,8}", version):
        raise LayoutError(f"schema is {quoted(schema)}; layout.save() writes {SCHEMA!r}")
    if int(version) > VERSION:
        raise LayoutError(f"schema {quoted(schema)} is newer than this kvplan, which reads {SCHEMA!r}; upgrade kvplan")


def _region(entry: Mapping[str, Any], *, virtual: bool) -> Region:
    address, nbytes = _whole(entry, "address", 0), _whole(entry, "nbytes", 1)
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
    table = None if entry["table"] is None else tuple(_wholes(entry, "table", -INT64_MAX))
    block, token, head, dim = (_factors(entry[axis]) for axis in ("block", "token", "head", "dim"))
    form = Form(
        block,
        token,
        head,
        dim,
        head_start=_whole(entry, "head_start", 0, LIMITS.number),
        headed=_flag(entry["headed"]),
        opaque=_flag(entry["opaque"]),
        table=table,
    )
    if table is not None and (len(table) != blocks or table[0] != 0):
        raise LayoutError(f"a table has {len(table)} entries; it is the bytes from block 0 to each of {blocks} blocks")
    slots = (None if subblocked else 1) if form.opaque else tokens
    for axis, count in (("block", 1 if table else blocks), ("token", slots), ("head", None if form.headed else 1)):
        if count is not None and extent(getattr(form, axis)) != count:
            raise LayoutError(f"a component has {quoted(extent(getattr(form, axis)))} of axis {axis}, not {count}")
    if form.opaque and tokens % form.subblocks:
        raise LayoutError(f"{form.subblocks} sub-blocks do not divide block_tokens, {tokens}")
    if extent(form.head) > LIMITS.number + 1 - form.head_start:
        raise LayoutError(
            f"{quoted(extent(form.head))} heads from number {form.head_start}; the largest number is {LIMITS.number}"
        )
    if extent(form.dim) > INT64_MAX:
        raise LayoutError(f"a row has {quoted(extent(form.dim))} bytes, more than any memory")
    return form


def _factors(pairs: Sequence[Sequence[int]]) -> Factors:
    return normal([(integer("an extent", count, least=1, most=INT64_MAX),
                    integer("a stride", stride, least=0, most=INT64_MAX)) for count, stride in pairs])  # fmt: skip


def _whole(entry: Mapping[str, Any], key: str, least: int, most: int = INT64_MAX) -> int:
    return integer(key, entry[key], least=least, most=most)


def _wholes(entry: Mapping[str, Any], key: str, least: int = 0, most: int = INT64_MAX) -> list[int]:
    return [integer(key, number, least=least, most=most) for number in entry[key]]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise LayoutError(f"{quoted(value)} is neither true nor false")
    return value
