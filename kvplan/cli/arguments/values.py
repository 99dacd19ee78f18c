"""Read the values of options: whole numbers, rates, lengths, block ids, bytes at an address, GPUs."""

from __future__ import annotations

import argparse
import re
from functools import partial

from kvplan.base.quoting import quoted
from kvplan.layout.components import INT64_MAX

LARGEST = 10**18 - 1  # the largest whole number that is accepted
_IDS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_ADDRESS = "(0x[0-9a-f]{1,16}|[0-9]{1,19})"
_SPAN = re.compile(f"(?:{_ADDRESS}@)?{_ADDRESS}", re.IGNORECASE)


def whole(text: str, least: int = 0, most: int = LARGEST) -> int:
    """Read a whole number.

    >>> whole("12")
    12
    """
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if not least <= number <= most:
        limit = "" if most == LARGEST else f" and at most {most:,}"
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number of at least {least}{limit}")
    return number


positive = partial(whole, least=1, most=2**31 - 1)


def rate(text: str) -> float:
    """Read a rate in GB/s, which is 10^9 bytes per second.

    >>> rate("55.1")
    55.1
    """
    return _above_0(text, "a rate in GB/s")


def _above_0(text: str, what: str, divisor: int = 1) -> float:
    try:
        number = float(text) / divisor
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not {what} above 0")
    return number


def context_lengths(text: str) -> tuple[int, ...]:
    """Read lengths of contexts, in tokens; ``k`` stands for 1,024 tokens.

    >>> context_lengths("500,32k,32K")
    (500, 32768, 32768)
    """
    found = []
    for item in text.split(","):
        match = re.fullmatch("([0-9]{1,9})([kK]?)", item.strip())
        tokens = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if not 0 < tokens < 2**31:
            raise argparse.ArgumentTypeError(f"{quoted(item)} is not a number of tokens from 1 to 2^31 - 1, as in 32k")
        found.append(tokens)
    return tuple(found)


def block_ids(text: str) -> tuple[range, ...]:
    """Read block ids as ranges.

    >>> block_ids("0,1,4-7")
    (range(0, 1), range(1, 2), range(4, 8))
    """
    found = []
    for item in text.split(","):
        match = _IDS.fullmatch(item.strip())
        first, last = (int(end) for end in (match[1], match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise argparse.ArgumentTypeError(
                f"{quoted(item)} in {quoted(text)} is not a block id or a range of them, as in 0,1,4-7"
            )
        found.append(range(first, last + 1))
    return tuple(found)


def span(text: str) -> tuple[int, int]:
    """Read a number of bytes, and the address of the first byte.

    >>> span("16@0x7f00"), span("4096")
    ((16, 32512), (1, 4096))
    """
    match = _SPAN.fullmatch(text)
    nbytes, address = (
        (int(number, 16 if number[:2].lower() == "0x" else 10) for number in (match[1] or "1", match[2]))
        if match
        else (0, 0)
    )
    if nbytes < 1 or address + nbytes > INT64_MAX:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not BYTES@ADDRESS, as in 16@0x7f0000002000")
    return nbytes, address


def gpu(text: str) -> str:
    """Read the name of a GPU. Without a number it is the first GPU.

    >>> gpu("cuda"), gpu("cuda:1")
    ('cuda:0', 'cuda:1')
    """
    if text == "cuda":
        return "cuda:0"
    if not re.fullmatch(r"cuda:\d{1,5}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a GPU, as in cuda:0")
    return text
