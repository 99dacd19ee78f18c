"""The findings about a set of programs: bytes of their destinations that no program writes, or that several write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvplan.base.numbers import number_ranges
from kvplan.layout.inverse import Row
from kvplan.layout.places import row_in_words


class Finding(NamedTuple):
    """Bytes of one destination that no program writes, or that several programs write; ``str`` says it in words.

    Attributes:
        destination: number of the destination: of the resharding, or in the order in which the programs name them.
        programs: names of the programs that write the first of these bytes; empty if no program does.
        layers: global numbers of the layers that hold such bytes.
        parts: names of the parts.
        heads: global numbers of the heads; empty for content without heads.
        nbytes: number of such bytes.
        first: coordinates of the first one.
    """

    destination: int
    programs: tuple[str, ...]
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    heads: tuple[int, ...]
    nbytes: int
    first: Row

    def __str__(self) -> str:
        words = [f"layer{'s' * (len(self.layers) > 1)} {number_ranges(self.layers)}", " ".join(self.parts)]
        if self.heads:
            words.append(f"head{'s' * (len(self.heads) > 1)} {number_ranges(self.heads)}")
        by = f"written by programs {' and '.join(self.programs)}" if self.programs else "written by no program"
        where = f"destination {self.destination}: {', '.join(words)}"
        return f"{self.nbytes:,} bytes of {where}, {by}; the first is {row_in_words(self.first, byte=True)}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The findings of :func:`kvplan.verify` on a set of programs.

    Attributes:
        ok: whether every byte of the destinations' blocks has exactly one writer.
        programs: number of programs.
        destinations: number of destinations.
        nbytes: bytes of content of the destinations' blocks that were looked at.
        unwritten: bytes that no program writes.
        twice: bytes that two or more programs write.
        wrong: all of this in words, or None.
    """

    ok: bool
    programs: int
    destinations: int
    nbytes: int
    unwritten: tuple[Finding, ...] = ()
    twice: tuple[Finding, ...] = ()
    wrong: str | None = None
