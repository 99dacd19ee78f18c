"""Read layouts from specs (TOML, JSON or mappings), which have made-up addresses and no tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from kvplan.base.integers import integer, integers
from kvplan.base.limits import LIMITS, Budget
from kvplan.base.quoting import listed, quoted
from kvplan.base.reading import json_of, read_whole, toml_of
from kvplan.errors import LayoutError
from kvplan.layout.build import Naming, assemble, part_name
from kvplan.layout.components import INT64_MAX, Built, Region, quoted_address
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.dump import built_from_dump
from kvplan.layout.merging import merged
from kvplan.layout.notation import Notation, parse
from kvplan.layout.tensors import TensorFacts

# Separate tensors of a spec begin at multiples of this number of bytes, as tensors of a GPU allocator do.
TENSOR_ALIGNMENT = 2 << 20
_DEVICE = re.compile(r"(cpu|cuda|hip|xpu|npu|tpu|mps)(:[0-9]{1,9})?")
DEVICE_BASE = {"cuda": 0x7F00_0000_0000}
HOST_BASE = 0x7E00_0000_0000

_KEYS = frozenset((
    "address", "device", "dtype", "head_start", "layer_start", "layers", "name", "notation", "part", "seams", "sizes",
    "strides",
))  # fmt: skip


def built_from_spec(spec: str | Path | Mapping[str, Any], budget: Budget | None = None, level: int = 0) -> Built:
    """Return the layout that a spec describes; see :meth:`kvplan.KVLayout.from_spec`.

    Args:
        spec: path of a file, or its content.
        budget: limits of the work for the whole document that contains the spec.
        level: number of nested ``layouts`` lists around the spec.
    """
    content = _load(spec)
    budget = budget or Budget()
    if "schema" in content:
        try:
            return built_from_dump(content, budget)
        except LayoutError as error:
            if isinstance(spec, Mapping):
                raise
            raise LayoutError(f"{quoted(str(spec))}: {error}") from error
    if "layouts" in content:
        return _side_by_side(content, budget, level)
    return _one(content, budget)


def _side_by_side(content: Mapping[str, Any], budget: Budget, level: int) -> Built:
    """Merge the entries of ``layouts``. An entry without an address begins after all earlier entries on its device."""
    several = content["layouts"]
    if not isinstance(several, Sequence) or isinstance(several, str) or not several:
        raise LayoutError(f"'layouts' is {quoted(several)}; it is a list of at least one spec")
    if level == LIMITS.spec_levels:
        raise LayoutError(
            f"'layouts' are nested in 'layouts' more than {LIMITS.spec_levels} levels deep; one level is enough"
        )
    unknown = sorted(map(quoted, set(content) - {"layouts", "name"}))
    if unknown:
        raise LayoutError(f"spec has {unknown[0]} beside 'layouts'; give it in each entry")
    free: dict[str, int] = {}
    held: list[Built] = []
    for k, entry in enumerate(several):
        if not isinstance(entry, Mapping):
            raise LayoutError(f"layouts[{k}] is {quoted(entry)}; each entry is a spec, a table of keys")
        device = entry.get("device", "cpu")
        known = isinstance(device, str) and device in free and "address" not in entry
        built = built_from_spec({**entry, "address": free[device]} if known else entry, budget, level + 1)
        held.append(built)
        end = max(region.end for region in built.regions)
        if isinstance(device, str):
            free[device] = max(free.get(device, 0), -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT)
    built = merged(held, budget)
    return built._replace(regions=_joined(built.regions))


def _joined(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Join regions that overlap: entries whose addresses interleave, such as the parts of one page, share memory."""
    found: list[Region] = []
    for region in regions:  # in order of address
        last = found[-1] if found else None
        if last is None or region.address >= last.end or not (last.virtual and region.virtual):
            found.append(region)
            continue
        end, seams = max(last.end, region.end), tuple(sorted({*last.seams, *region.seams}))
        found[-1] = replace(last, nbytes=end - last.address, seams=seams)
    return tuple(found)


def _sequence(spec: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    value = spec[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise LayoutError(f"spec {key!r} is {quoted(value)}; it is a list of integers")
    return tuple(value)


def _load(spec: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(spec, Mapping):
        return spec
    if not isinstance(spec, str | Path):
        raise LayoutError(f"a spec is a file or a mapping, not {quoted(spec)}")
    path = Path(spec)
    try:
        text = read_whole(path)
    except LayoutError as error:
        raise LayoutError(f"cannot read the spec {quoted(str(path))}: {error}") from error
    is_json = path.suffix == ".json" or text.startswith("{")  # a dump, whatever its suffix
    try:
        content = json_of(text) if is_json else toml_of(text)
    except LayoutError as error:
        raise LayoutError(f"{quoted(str(path))} is not {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(content, dict):
        raise LayoutError(f"{quoted(str(path))} holds a {type(content).__name__}; a spec is a table of keys")
    return content


def _one(spec: Mapping[str, Any], budget: Budget) -> Built:
    unknown = sorted(map(quoted, set(spec) - _KEYS))
    if unknown:
        raise LayoutError(f"spec has unknown key {unknown[0]}; keys are {', '.join(sorted(_KEYS))}")
    for key, kind in (("notation", str), ("sizes", Mapping)):
        if not isinstance(spec.get(key), kind):
            raise LayoutError(f"spec needs {key!r}; got {quoted(spec.get(key))}")
    if len(spec["notation"]) > LIMITS.notation_length:
        raise LayoutError(
            f"notation has {len(spec['notation']):,} characters; it has at most {LIMITS.notation_length:,}"
        )
    notation = parse(spec["notation"])
    sizes = extents_of(notation, spec["sizes"])
    dtype = spec.get("dtype", "bfloat16")
    itemsize = ITEMSIZE.get(dtype) if isinstance(dtype, str) else None
    if itemsize is None:
        raise LayoutError(f"dtype {quoted(dtype)} is unknown; one of {', '.join(sorted(ITEMSIZE))}")
    _check_counts(notation, sizes)
    shape = shape_of(notation, sizes)
    strides = _strides(spec.get("strides"), shape, itemsize)
    nested = {axis: sizes[axis] for axis in notation.nesting}
    Budget().use("components", sizes.get("layer", 1) * sizes.get("kv", 1))  # checked before tensors are made
    budget.use("tensors", prod(nested.values()))
    tensors = _place(spec, prod(nested.values()), shape, strides, itemsize, dtype)
    naming = Naming(
        _sequence(spec, "layers") if "layers" in spec else _integer(spec, "layer_start", 0, LIMITS.number),
        _integer(spec, "head_start", 0, LIMITS.number),
        part_name(spec.get("part", "kv")),
    )
    seams = _sequence(spec, "seams") if "seams" in spec else ()
    plain = {name: size for name, size in sizes.items() if name != "kv"}
    built = assemble(notation, tensors, nested, plain, naming, seams, budget)
    if "dtype" in spec:
        return built
    components = tuple(replace(component, dtype="") for component in built.components)  # only their bytes are known
    return built._replace(components=components)


def _check_counts(notation: Notation, sizes: Mapping[str, int]) -> None:
    """Check the extents of ``head`` and ``token``, whose coordinates are visited one by one."""
    for axis, most in (("head", LIMITS.heads), ("token", LIMITS.block_tokens)):
        count = prod(sizes[str(atom)] for atom in notation.factors(axis))
        if count > most:
            raise LayoutError(f"sizes make {axis} {quoted(count)}; a spec has at most {most:,}")


def _integer(spec: Mapping[str, Any], key: str, default: int, most: int = INT64_MAX) -> int:
    return integer(f"spec {key!r}", spec.get(key, default), least=0, most=most)


def extents_of(notation: Notation, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return the extent of every axis and factor of a notation, from sizes alone.

    Raises:
        LayoutError: a size is missing or unknown, or is not a positive integer.

    >>> from kvplan.layout.notation import parse
    >>> extents_of(parse("block head.0 token head.1 dim"), {"block": 4, "head": 8, "head.1": 4, "token": 16, "dim": 64})
    {'block': 4, 'head': 8, 'head.1': 4, 'token': 16, 'dim': 64, 'head.0': 2}
    """
    names = {str(atom) for dim in notation.dims for atom in dim} | notation.axes
    known: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in names:
            raise LayoutError(
                f"sizes name {quoted(name)}, which {quoted(str(notation))} does not have (it has "
                f"[{listed(sorted(names))}])"
            )
        right = "an extent is an integer of at least 1, in int64"
        known[name] = integer(f"sizes[{name!r}]", size, least=1, most=INT64_MAX, right=right)
    if "kv" in notation.axes and known.setdefault("kv", 2) != 2:
        raise LayoutError(f"sizes say kv={known['kv']}; its extent is 2, K and V")
    for axis in sorted(notation.axes):
        factors = [str(atom) for atom in notation.factors(axis)]
        missing = [name for name in (factors or [axis]) if name not in known]
        if len(factors) > 1 and len(missing) == 1 and axis in known:
            rest = prod(known[name] for name in factors if name in known)
            if known[axis] % rest:
                raise LayoutError(f"{axis}={known[axis]} cannot be split into factors of {quoted(rest)}")
            known[missing[0]] = known[axis] // rest
        elif missing:
            whole = f"; give all factors of {axis}={known[axis]} but one" if axis in known and factors else ""
            raise LayoutError(
                f"{quoted(str(notation))} needs sizes[{missing[0]!r}]; sizes give [{listed(sorted(sizes))}]{whole}"
            )
    return known


def shape_of(notation: Notation, extents: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of one tensor, in elements."""
    return tuple(prod(extents[str(atom)] for atom in dim) for dim in notation.dims)


def _strides(given: Any, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return strides in bytes: the given strides, which are in elements; or the strides of a contiguous tensor."""
    if given is not None:
        right = f"give {len(shape)} integers, in elements, one a dim"
        if not isinstance(given, Sequence) or len(given) != len(shape):
            raise LayoutError(f"spec 'strides' is {quoted(given)}; {right}")
        return tuple(stride * itemsize for stride in integers("spec 'strides'", given, right=right))
    strides: list[int] = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _place(
    spec: Mapping[str, Any], count: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, dtype: str
) -> list[TensorFacts]:
    device = spec.get("device", "cpu")
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise LayoutError(f"device is {quoted(device)}; write 'cpu', or a kind of GPU as 'cuda' or 'cuda:0'")
    base = DEVICE_BASE.get(device.partition(":")[0], HOST_BASE)
    address = _integer(spec, "address", base)
    nbytes = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + itemsize
    step = (nbytes // TENSOR_ALIGNMENT + 1) * TENSOR_ALIGNMENT  # tensors never touch, so that their copies do not merge
    if address + count * step > INT64_MAX:
        raise LayoutError(
            f"{count} tensors of {quoted(nbytes)} bytes from {quoted_address(address)} pass the largest int64 address"
        )
    return [
        TensorFacts(
            address + k * step, tuple(shape), tuple(strides), itemsize, dtype,
            Region(address + k * step, nbytes, device, virtual=True),
        )
        for k in range(count)
    ]  # fmt: skip
