"""Add and read arguments: numbers, block ids, addresses, files, and layouts, from a spec file or from a notation."""

from __future__ import annotations

import argparse
import errno
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvplan.base.files import write_whole
from kvplan.base.values import quoted
from kvplan.errors import KVPlanError, LayoutError, bounded
from kvplan.layout.components import INT64_MAX
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import parse

SOURCE = "a .toml or .json spec, a dump, or a notation (in quotes), which needs --sizes"
SIZES = "AXIS=EXTENT,..."
IN_ELEMENTS = "in elements: layer=80,block=1024,..."
SIDES = ("src", "dst")
# Options that several commands have.
SHARED: dict[str, dict[str, Any]] = {
    "--no-advice": {"dest": "advice", "action": "store_false",
                    "help": "search no better orders, which takes most of the time"},
    "--reinterpret": {"action": "store_true",
                      "help": "compile although number formats differ; a copy converts no numbers"},
    "--profile": {"metavar": "NAME", "help": "whose costs: part of a shipped GPU's name, 'default', or a file (default "
                  "this GPU's)"},
    "--overlap": {"metavar": "WHAT",
                  "help": "compute that runs at the same time: idle, decode or prefill (default idle)"},
}  # fmt: skip


def add_shared(parser: Any, *options: str) -> None:
    """Add options of :data:`SHARED`."""
    for option in options:
        parser.add_argument(option, **SHARED[option])


def add_layout(parser: Any) -> None:
    """Add the arguments of one layout, but its name ``layout``; :func:`read_layout` reads them."""
    parser.add_argument("--sizes", type=sizes, metavar=SIZES, help=f"of a notation, {IN_ELEMENTS}")
    parser.add_argument("--dtype", help="of a notation (default bf16)")
    parser.add_argument("--device", help="of a notation (default cpu)")


def add_pair(
    parser: argparse.ArgumentParser, names: tuple[str, str] = SIDES, count: str | None = None, device: str = "cpu"
) -> None:
    """Add the arguments that name a source and a destination layout; :func:`layouts_of` reads them.

    Args:
        parser: parser of the command.
        names: names of the source and the destination in the help.
        count: ``"?"`` if the destination may be left out.
        device: device of the source, if it is a notation and no option names one.
    """
    source, destination = (name.upper() for name in names)
    parser.set_defaults(usual_device=device)
    parser.add_argument("source", metavar=source, help=SOURCE)
    parser.add_argument("destination", metavar=destination, nargs=count, help="the same")
    parser.add_argument("--sizes", type=sizes, metavar=SIZES, help=f"of notations, {IN_ELEMENTS}")
    parser.add_argument("--dtype", help="of notations (default: the other file's, or bf16)")
    for side, name, usual in zip(SIDES, (source, destination), (device, "cpu"), strict=True):
        parser.add_argument(f"--{side}-sizes", type=sizes, metavar=SIZES, help=f"where {name} differs")
        parser.add_argument(f"--{side}-device", metavar="DEVICE", help=f"of {name}, a notation (default {usual})")


def add_blocks(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the blocks of a plan, and the profile and policy that choose its path."""
    parser.add_argument("--blocks", type=block_ids, metavar="IDS", help="of a plan, on both sides: 0,1,4-7")
    for side in SIDES:
        parser.add_argument(f"--{side}", type=block_ids, metavar="IDS", help="where that side has other blocks")
    add_shared(parser, "--profile", "--overlap")


def layouts_of(args: argparse.Namespace) -> tuple[KVLayout, Any]:
    """Read the source and destination layouts that :func:`add_pair`'s arguments name; no destination is None.

    A notation beside a file has the file's dtype, unless ``--dtype`` gives another one.

    Raises:
        KVPlanError: one of them cannot be read, or is not a layout.
    """
    sources = {side: source for side, source in zip(SIDES, (args.source, args.destination), strict=True) if source}
    if all(map(_is_file, sources.values())):
        _refuse(args.source, {"--sizes": args.sizes, "--dtype": args.dtype})
    layouts: dict[str, KVLayout] = {}
    dtype = args.dtype
    for side in sorted(sources, key=lambda side: not _is_file(sources[side])):
        source, own, device = sources[side], getattr(args, f"{side}_sizes"), getattr(args, f"{side}_device")
        if _is_file(source):
            layouts[side] = read_layout(source, own, None, device, f"{side}-")
            if "+" not in layouts[side].dtype:  # parts of one dtype
                dtype = dtype or layouts[side].dtype
            continue
        # --sizes is for both notations: a size that only the other notation names is left out here.
        notation = parse(source)
        names = notation.axes | {str(atom) for dim in notation.dims for atom in dim}
        common = {name: extent for name, extent in (args.sizes or {}).items() if name in names or len(sources) == 1}
        usual = args.usual_device if side == "src" else "cpu"
        layouts[side] = read_layout(source, common | (own or {}), dtype, device or usual)
    return layouts["src"], layouts.get("dst")


def read_layout(
    source: str, sizes: dict[str, int] | None = None, dtype: str | None = None, device: str | None = None,
    side: str = "",
) -> KVLayout:  # fmt: skip
    """Read a layout from a file, or from a notation with its sizes, dtype and device.

    Raises:
        KVPlanError: it cannot be read, or is not a layout; or a file with what belongs to a notation.
    """
    if _is_file(source):
        _refuse(source, {f"--{side}sizes": sizes, "--dtype": dtype, f"--{side}device": device})
        try:
            return KVLayout.from_spec(source)
        except KVPlanError as error:
            if str(Path(source)) not in str(error):  # name the one of two files
                error.args = (bounded(f"{source}: {error}"),)
            raise
    try:
        return KVLayout.from_spec({"notation": source, "sizes": sizes or {}, "dtype": dtype or "bf16",
                                   "device": device or "cpu"})  # fmt: skip
    except LayoutError as error:
        if missing := re.search(r"needs sizes\['([a-z.0-9]+)'\]", str(error)):
            raise LayoutError(f"{error}; give --sizes {missing[1]}=EXTENT,...") from error
        raise


def _is_file(source: str) -> bool:
    if source.endswith((".toml", ".json")) or "/" in source:  # no notation holds a slash
        return True
    return not re.search(r"[\s:(]", source) and Path(source).is_file()  # a notation of one word


def _refuse(source: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise KVPlanError(f"{option} goes with a notation; {quoted(source)} is a file, which states its own")


def write_file(option: str, name: str | Path, content: bytes) -> None:
    """Write a file completely or not at all, so that no reader sees half of it.

    Raises:
        KVPlanError: it cannot be written.
    """
    with _writable(option, name):
        write_whole(Path(name), content)


def check_file(option: str, name: str | Path) -> None:
    """Check that a file can be written, before a command works and prints.

    Raises:
        KVPlanError: it cannot be written.
    """
    with _writable(option, name):
        path = Path(os.path.realpath(name))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not path.exists() or path.is_file():  # pipes and devices are written directly
            TemporaryFile(dir=path.parent).close()  # as the new content is: in the folder of the file


@contextmanager
def _writable(option: str, name: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise KVPlanError(f"{option} {str(name)!r} cannot be written: {why}") from None


def _match(pattern: str, text: str, expected: str) -> re.Match[str]:
    """Match a text, or say what was expected."""
    match = re.fullmatch(pattern, text.strip(), re.ASCII | re.IGNORECASE)
    _check(match, text, expected)
    return match  # type: ignore[return-value]


def _check(right: object, text: str, expected: str) -> None:
    if not right:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not {expected}")


def sizes(text: str) -> dict[str, int]:
    """Read extents by axis.

    >>> sizes("layer=80,head.1=4")
    {'layer': 80, 'head.1': 4}
    """
    expected = "AXIS=EXTENT, as in layer=80,block=1024"
    pairs = [_match(r"([a-z]+(?:\.[0-9]+)?)=([0-9]{1,18})", item, expected).groups() for item in text.split(",")]
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise argparse.ArgumentTypeError(f"{quoted(name)} is given twice in {quoted(text)}")
    return {name: int(extent) for name, extent in pairs}


def whole(text: str, least: int = 0, most: int = 10**18 - 1) -> int:
    """Read a whole number.

    >>> whole("12")
    12
    """
    limit = f"a whole number of at least {least}" + ("" if most == 10**18 - 1 else f" and at most {most:,}")
    number = int(_match("[0-9]{1,18}", text, limit)[0])
    _check(least <= number <= most, text, limit)
    return number


positive = partial(whole, least=1, most=2**31 - 1)


def rate(text: str) -> float:
    """Read a rate in GB/s, which is 10^9 bytes per second."""
    expected = "a rate in GB/s above 0"
    number = float(_match(r"[0-9]{0,12}\.?[0-9]{1,12}(e[+-]?[0-9])?", text, expected)[0])
    _check(number, text, expected)
    return number


def amounts(text: str, least: int = 1) -> tuple[int, ...]:
    """Read whole numbers, of bytes or of tokens; ``K`` stands for 1,024.

    >>> amounts("512,28K,1MiB")
    (512, 28672, 1048576)
    """
    expected, numbers = f"a size or number of at least {least}, as in 512, 32k or 1M", []
    for item in text.split(","):
        match = _match(r"(\d{1,12})([KMG]?)(?:iB)?", item, expected)
        numbers.append(int(match[1]) << 10 * " KMG".index(match[2].upper() or " "))
        _check(numbers[-1] >= least, item, expected)
    return tuple(numbers)


def block_ids(text: str) -> tuple[range, ...]:
    """Read block ids as ranges.

    >>> block_ids("0,1,4-7")
    (range(0, 1), range(1, 2), range(4, 8))
    """
    expected, ranges = f"a block id or a range of them in {quoted(text)}, as in 0,1,4-7", []
    for item in text.split(","):
        first, last = _match("([0-9]{1,18})(?:-([0-9]{1,18}))?", item, expected).groups()
        ranges.append(range(int(first), int(last or first) + 1))
        _check(ranges[-1], item, expected)
    return tuple(ranges)


def span(text: str) -> tuple[int, int]:
    """Read a number of bytes, and the address of the first byte.

    >>> span("16@0x7f00"), span("4096")
    ((16, 32512), (1, 4096))
    """
    number, expected = "(0x[0-9a-f]{1,16}|[0-9]{1,19})", "BYTES@ADDRESS, as in 16@0x7f0000002000"
    match = _match(f"(?:{number}@)?{number}", text, expected)
    nbytes, address = (int(each, 16 if each[:2].lower() == "0x" else 10) for each in (match[1] or "1", match[2]))
    _check(nbytes and address + nbytes <= INT64_MAX, text, expected)
    return nbytes, address


def gpu(text: str) -> str:
    """Read the name of a GPU. Without a number it is the first GPU.

    >>> gpu("cuda"), gpu("cuda:1")
    ('cuda:0', 'cuda:1')
    """
    return "cuda:0" if text == "cuda" else _match(r"cuda:\d{1,5}", text, "a GPU, as in cuda:0")[0]


def names(text: str) -> tuple[str, ...]:
    """Read words between commas, each once."""
    return tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
