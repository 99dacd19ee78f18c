"""Layouts from a spec: TOML, JSON or a mapping; no tensors, no torch, made-up addresses."""

from __future__ import annotations

import errno
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from kvplan.build import Built, Naming, assemble, part_name
from kvplan.components import INT64_MAX, Region
from kvplan.errors import LayoutError
from kvplan.integers import integer, integers, shown
from kvplan.notation import Notation, parse
from kvplan.tensors import TensorFacts

ITEMSIZE = {
    "int8": 1, "uint8": 1, "byte": 1, "bool": 1, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "e4m3": 1, "e5m2": 1,
    "int16": 2, "uint16": 2, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "fp32": 4, "float32": 4, "float": 4,
    "int64": 8, "uint64": 8, "fp64": 8, "float64": 8, "double": 8,
}  # fmt: skip

# Separate tensors of a spec begin at multiples of this, as those of a GPU allocator do.
TENSOR_ALIGNMENT = 2 << 20
MAX_TENSORS = 1 << 20
_DEVICE = re.compile(r"(cpu|cuda|hip|xpu|npu|tpu|mps)(:\d+)?")
DEVICE_BASE = {"cuda": 0x7F00_0000_0000}
HOST_BASE = 0x7E00_0000_0000

_KEYS = frozenset((
    "address", "device", "dtype", "head_start", "layer_start", "layers", "name", "notation", "part", "seams", "sizes",
    "strides",
))  # fmt: skip


def built_from_spec(spec: str | Path | Mapping[str, Any]) -> tuple[Built, str]:
    """Parts and notation of the layout a spec describes; see :meth:`kvplan.KVLayout.from_spec`."""
    content = _load(spec)
    if "schema" in content:
        from kvplan.dump import built_from_dump

        try:
            return built_from_dump(content)
        except LayoutError as error:
            if isinstance(spec, Mapping):
                raise
            raise LayoutError(f"{str(spec)!r}: {error}") from error
    if "layouts" in content:
        from kvplan.layout import KVLayout  # merging is a verb of the public class

        merged = KVLayout.merge([KVLayout.from_spec(entry) for entry in _side_by_side(content)])
        built = Built(merged.components, merged.regions, merged.num_blocks, merged.block_tokens, merged.sizes,
                      merged.dtype)  # fmt: skip
        return built, merged.notation
    return _one(content)


def _side_by_side(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The entries of ``layouts``; those without an address begin after the one before, on the same device."""
    several = content["layouts"]
    if not isinstance(several, Sequence) or isinstance(several, str) or not several:
        raise LayoutError(f"'layouts' is {several!r}; it is a list of at least one spec")
    unknown = sorted(set(content) - {"layouts", "name"})
    if unknown:
        raise LayoutError(f"spec has {unknown[0]!r} beside 'layouts'; it belongs into each of the entries")
    free: dict[str, int] = {}
    for k, entry in enumerate(several):
        if not isinstance(entry, Mapping):
            raise LayoutError(f"layouts[{k}] is {entry!r}; each entry is a spec, a table of keys")
        device = str(entry.get("device", "cpu"))
        placed = entry if "address" in entry or device not in free else {**entry, "address": free[device]}
        yield placed
        end = max(region.end for region in built_from_spec(placed)[0].regions)
        free[device] = max(free.get(device, 0), -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT)


def _sequence(spec: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    value = spec[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise LayoutError(f"spec {key!r} is {value!r}; it is a list of integers")
    return tuple(value)


def read_whole(path: Path) -> str:
    """The text of a file; a device or a pipe may never end, and is none.

    Raises:
        OSError: it cannot be read, or is no file.
        UnicodeDecodeError: no text.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "no file, but a device or a pipe")
    return path.read_text(encoding="utf-8")


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Why a file could not be read, without its name.

    >>> why_unread(FileNotFoundError(2, "No such file or directory", "a.toml"))
    'No such file or directory'
    """
    return str(getattr(error, "strerror", None) or error)


def _load(spec: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(spec, Mapping):
        return spec
    if not isinstance(spec, str | Path):
        raise LayoutError(f"a spec is a file or a mapping, not {spec!r}")
    path, kind = Path(spec), "a file"
    try:
        text = read_whole(path)
        kind = "JSON" if path.suffix == ".json" or text.startswith("{") else "TOML"  # a dump, by whatever name
        content = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"cannot read the spec {str(path)!r}: {why_unread(error)}") from error
    except (ValueError, RecursionError) as error:  # besides syntax: numbers of thousands of digits, endless nesting
        raise LayoutError(f"{str(path)!r} is not {kind}: {error}") from error
    if not isinstance(content, dict):
        raise LayoutError(f"{str(path)!r} holds a {type(content).__name__}; a spec is a table of keys")
    return content


def _one(spec: Mapping[str, Any]) -> tuple[Built, str]:
    unknown = sorted(set(spec) - _KEYS)
    if unknown:
        raise LayoutError(f"spec has unknown key {unknown[0]!r}; keys are {', '.join(sorted(_KEYS))}")
    for key, kind in (("notation", str), ("sizes", Mapping)):
        if not isinstance(spec.get(key), kind):
            raise LayoutError(f"spec needs {key!r}; got {spec.get(key)!r}")
    notation = parse(spec["notation"])
    sizes = extents_of(notation, spec["sizes"])
    dtype = str(spec.get("dtype", "bfloat16"))
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise LayoutError(f"dtype {dtype!r} is unknown; one of {', '.join(sorted(ITEMSIZE))}")
    shape = shape_of(notation, sizes)
    strides = _strides(spec.get("strides"), shape, itemsize)
    nested = {axis: sizes[axis] for axis in notation.nesting}
    tensors = _place(spec, prod(nested.values()), shape, strides, itemsize, dtype)
    naming = Naming(
        _sequence(spec, "layers") if "layers" in spec else _integer(spec, "layer_start", 0),
        _integer(spec, "head_start", 0),
        part_name(spec.get("part", "kv")),
    )
    seams = _sequence(spec, "seams") if "seams" in spec else ()
    plain = {name: size for name, size in sizes.items() if name != "kv"}
    return assemble(notation, tensors, nested, plain, naming, seams), str(notation)


def _integer(spec: Mapping[str, Any], key: str, default: int) -> int:
    return integer(f"spec {key!r}", spec.get(key, default), least=0)


def extents_of(notation: Notation, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Extent of every axis and factor of a notation, all of them told by sizes.

    Raises:
        LayoutError: a size that is missing, unknown, or no positive integer.

    >>> from kvplan.notation import parse
    >>> extents_of(parse("block head.0 token head.1 dim"), {"block": 4, "head": 8, "head.1": 4, "token": 16, "dim": 64})
    {'block': 4, 'head': 8, 'head.1': 4, 'token': 16, 'dim': 64, 'head.0': 2}
    """
    names = {str(atom) for dim in notation.dims for atom in dim} | notation.axes
    known: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in names:
            raise LayoutError(f"sizes name {name!r}, which '{notation}' does not have (it has {sorted(names)})")
        known[name] = integer(f"sizes[{name!r}]", size, least=1, right="an extent is an integer of at least 1")
    if "kv" in notation.axes and known.setdefault("kv", 2) != 2:
        raise LayoutError(f"sizes say kv={known['kv']}; its extent is 2, K and V")
    for axis in sorted(notation.axes):
        factors = [str(atom) for atom in notation.factors(axis)]
        missing = [name for name in (factors or [axis]) if name not in known]
        if len(factors) > 1 and len(missing) == 1 and axis in known:
            rest = prod(known[name] for name in factors if name in known)
            if known[axis] % rest:
                raise LayoutError(f"{axis}={known[axis]} cannot be split into factors of {rest}")
            known[missing[0]] = known[axis] // rest
        elif missing:
            raise LayoutError(f"'{notation}' needs sizes[{missing[0]!r}]; sizes tell {sorted(sizes)}")
    return known


def shape_of(notation: Notation, extents: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one tensor, in elements."""
    return tuple(prod(extents[str(atom)] for atom in dim) for dim in notation.dims)


def _strides(given: Any, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes: as given in elements, or contiguous."""
    if given is not None:
        right = f"give {len(shape)} integers, in elements, one a dim"
        if not isinstance(given, Sequence) or len(given) != len(shape):
            raise LayoutError(f"spec 'strides' is {shown(given)}; {right}")
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
        raise LayoutError(f"device is {device!r}; write 'cpu', or a kind of GPU as 'cuda' or 'cuda:0'")
    if count > MAX_TENSORS:
        raise LayoutError(f"{count} tensors of their own; a spec holds at most {MAX_TENSORS}")
    base = DEVICE_BASE.get(device.partition(":")[0], HOST_BASE)
    address = _integer(spec, "address", base)
    nbytes = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + itemsize
    step = (nbytes // TENSOR_ALIGNMENT + 1) * TENSOR_ALIGNMENT  # never touching: separate tensors do not merge
    if address + count * step > INT64_MAX:
        raise LayoutError(f"{count} tensors of {nbytes} bytes from {address:#x} pass the largest int64 address")
    return [
        TensorFacts(
            address + k * step, tuple(shape), tuple(strides), itemsize, dtype,
            Region(address + k * step, nbytes, device, virtual=True),
        )
        for k in range(count)
    ]  # fmt: skip
