"""Read layouts from specs (TOML, JSON or mappings), which have made-up addresses and no tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from kvplan.base.files import LIMITS, Budget, json_of, read_whole, toml_of
from kvplan.base.values import integer, integers, quoted
from kvplan.errors import LayoutError
from kvplan.layout.build import Naming, assemble, part_name
from kvplan.layout.components import INT64_MAX, Built, Region, quoted_address
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.dump import built_from_dump
from kvplan.layout.extents import extents, shape_of
from kvplan.layout.merging import merged
from kvplan.layout.notation import parse
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


def built_from_spec(spec: str | Path | Mapping[str, Any], budget: Budget | None = None) -> Built:
    """Return the layout that a spec describes; see :meth:`kvplan.KVLayout.from_spec`.

    Args:
        spec: path of a file, or its content.
        budget: limits of the work for the whole document that contains the spec.
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
        return _side_by_side(content, budget)
    return _one(content, budget)


def _side_by_side(content: Mapping[str, Any], budget: Budget) -> Built:
    """Merge the entries of ``layouts``. An entry without an address begins after all earlier entries on its device."""
    several = content["layouts"]
    if not isinstance(several, Sequence) or isinstance(several, str) or not several:
        raise LayoutError(f"'layouts' is {quoted(several)}; it is a list of at least one spec")
    budget.use("a list")
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
        built = built_from_spec({**entry, "address": free[device]} if known else entry, budget)
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
    budget.use("a letter", len(spec["notation"]))
    notation = parse(spec["notation"])
    sizes = extents(notation, spec["sizes"])
    dtype = spec.get("dtype", "bfloat16")
    itemsize = ITEMSIZE.get(dtype) if isinstance(dtype, str) else None
    if itemsize is None:
        raise LayoutError(f"dtype {quoted(dtype)} is unknown; one of {', '.join(sorted(ITEMSIZE))}")
    for axis, what in (("head", "a head"), ("token", "a token slot")):  # coordinates that are visited one by one
        budget.use(what, prod(sizes[str(atom)] for atom in notation.factors(axis)))
    shape = shape_of(notation, sizes)
    strides = _strides(spec.get("strides"), shape, itemsize)
    nested = {axis: sizes[axis] for axis in notation.nesting}
    Budget().use("a layer and part", sizes.get("layer", 1) * sizes.get("kv", 1))  # checked before tensors are made
    budget.use("a tensor", prod(nested.values()))
    tensors = _place(spec, prod(nested.values()), shape, strides, itemsize, dtype)
    naming = Naming(
        _sequence(spec, "layers") if "layers" in spec else _integer(spec, "layer_start", 0, LIMITS.number),
        _integer(spec, "head_start", 0, LIMITS.number),
        part_name(spec.get("part", "kv")),
    )
    seams = _sequence(spec, "seams") if "seams" in spec else ()
    built = assemble(notation, tensors, nested, sizes, naming, seams, budget)
    if "dtype" in spec:
        return built
    components = tuple(replace(component, dtype="") for component in built.components)  # only their bytes are known
    return built._replace(components=components)


def _integer(spec: Mapping[str, Any], key: str, default: int, most: int = INT64_MAX) -> int:
    return integer(f"spec {key!r}", spec.get(key, default), least=0, most=most)


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
