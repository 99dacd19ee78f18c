"""Numbers as messages, tables and pictures show them: bytes, rates, shares, seconds, counts and ranges."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def count_of(count: int, noun: str) -> str:
    """Show a count and its noun.

    >>> count_of(1, "unit"), count_of(1024, "unit"), count_of(2, "2-D copy")
    ('1 unit', '1,024 units', '2 2-D copies')
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def nbytes_text(nbytes: int) -> str:
    """Show every byte.

    >>> nbytes_text(1), nbytes_text(4096)
    ('1 byte', '4,096 bytes')
    """
    return count_of(nbytes, "byte")


def binary(nbytes: int) -> str:
    """Round bytes to three digits, in the largest binary unit that leaves a whole number before the point.

    >>> binary(656), binary(8192), binary(1310720), binary(2**40)
    ('656 bytes', '8 KiB', '1.25 MiB', '1 TiB')
    """
    if nbytes < 1024:
        return nbytes_text(nbytes)
    power = min((nbytes.bit_length() - 1) // 10, len(_BINARY))
    value = nbytes / (1 << 10 * power)
    digits = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {_BINARY[power - 1]}"


def rounded(nbytes: int) -> str:
    """Round bytes as :func:`binary` does, with "B" for bytes.

    >>> rounded(656), rounded(532224)
    ('656 B', '520 KiB')
    """
    return f"{nbytes} B" if nbytes < 1024 else binary(nbytes)


def exact(nbytes: int) -> str:
    """Show every byte, and the rounded number in brackets.

    >>> exact(656), exact(1310720)
    ('656 bytes', '1,310,720 bytes (1.25 MiB)')
    """
    return nbytes_text(nbytes) + (f" ({binary(nbytes)})" if nbytes >= 1024 else "")


def decimal(nbytes: float) -> str:
    """Round bytes to three digits, in units of 1000.

    >>> decimal(1e9), decimal(2.5e3), decimal(12)
    ('1 GB', '2.5 KB', '12 B')
    """
    return _scaled(nbytes, {"GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0})


def _scaled(value: float, units: dict[str, float]) -> str:
    unit = next((unit for unit, size in units.items() if value >= size), [*units][-1])
    return f"{value / units[unit]:.3g} {unit}"


def rate(gbps: float) -> str:
    """Show a rate in GB/s: 1e9 bytes per second.

    >>> rate(54.94)
    '54.9 GB/s'
    """
    return f"{gbps:.1f} GB/s"


def percent(share: float) -> str:
    """Show a share, between 0 and 1, in percent.

    >>> percent(0.2), percent(1 / 7), percent(0.00012)
    ('20 %', '14.3 %', '0.01 %')
    """
    return f"{100 * share:.{1 if share >= 0.001 else 2}f}".removesuffix(".0") + " %"


def duration(seconds: float) -> str:
    """Round seconds to three digits.

    >>> duration(3.2e-9), duration(1.234e-5), duration(0.0456), duration(3)
    ('3.2 ns', '12.3 us', '45.6 ms', '3 s')
    """
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def between(low: int, high: int) -> str:
    """Show a range by its two ends, or by one end if they are equal.

    >>> between(512, 8192), between(512, 512)
    ('512-8,192', '512')
    """
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def number_ranges(numbers: Iterable[int], comma: str = " ") -> str:
    """Show ascending numbers, with consecutive numbers as a range.

    >>> number_ranges((0, 1, 2, 3, 8)), number_ranges(range(2, 4)), number_ranges([0, 2, 3], ", ")
    ('0-3 8', '2-3', '0, 2-3')
    """
    places = groupby(enumerate(numbers), key=lambda one: one[1] - one[0])  # the same for consecutive numbers
    runs = [[number for _, number in run] for _, run in places]
    return comma.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
