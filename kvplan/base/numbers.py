"""Numbers as messages, tables and pictures show them: bytes, rates, shares, seconds, counts and ranges."""

from __future__ import annotations

from collections.abc import Iterable

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def count_of(count: int, noun: str) -> str:
    """Show a count and its noun.

    >>> count_of(1, "unit"), count_of(1024, "unit")
    ('1 unit', '1,024 units')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


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


def spelled(nbytes: int) -> str:
    """Show every byte, in the largest binary unit that divides them.

    >>> spelled(512), spelled(28 << 10), spelled(1 << 20), spelled(1536)
    ('512 B', '28 KiB', '1 MiB', '1536 B')
    """
    power = min(((nbytes & -nbytes).bit_length() - 1) // 10, 3) if nbytes else 0
    return f"{nbytes >> 10 * power} {_BINARY[power - 1]}" if power else f"{nbytes} B"


def exact(nbytes: int) -> str:
    """Show every byte, and the rounded number in brackets.

    >>> exact(656), exact(1310720)
    ('656 bytes', '1,310,720 bytes (1.25 MiB)')
    """
    return nbytes_text(nbytes) if nbytes < 1024 else f"{nbytes_text(nbytes)} ({binary(nbytes)})"


def decimal(nbytes: float) -> str:
    """Round bytes to three digits, in units of 1000.

    >>> decimal(1e9), decimal(2.5e3), decimal(12)
    ('1 GB', '2.5 KB', '12 B')
    """
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.3g} B"


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
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def between(low: int, high: int) -> str:
    """Show a range by its two ends, or by one end if they are equal.

    >>> between(512, 8192), between(512, 512)
    ('512-8,192', '512')
    """
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def nbytes_between(low: int, high: int) -> str:
    """Show a range of bytes by its two ends, or by one end if they are equal.

    >>> nbytes_between(512, 8192), nbytes_between(512, 512)
    ('512 to 8,192 bytes', '512 bytes')
    """
    return nbytes_text(high) if low == high else f"{low:,} to {nbytes_text(high)}"


def number_ranges(numbers: Iterable[int], comma: str = " ") -> str:
    """Show ascending numbers, with consecutive numbers as a range.

    >>> number_ranges((0, 1, 2, 3, 8)), number_ranges(range(2, 4)), number_ranges([0, 2, 3], ", ")
    ('0-3 8', '2-3', '0, 2-3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return comma.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
