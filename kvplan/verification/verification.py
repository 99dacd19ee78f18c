"""The findings about one pair of live pools: whether every byte arrived, and which one did not."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.layout.inverse import Row
from kvplan.program.unwritten import UnwrittenHeads
from kvplan.verification.canary import Stray


@dataclass(frozen=True, slots=True)
class Verification:
    """The findings of :func:`kvplan.verify` about one pair of layouts.

    Attributes:
        ok: whether every byte arrived at its place, and no watched byte changed.
        blocks: ids of the blocks read, and of the blocks written.
        nbytes: number of compared bytes.
        markers: whether the source held markers; otherwise its own content was moved, in which equal rows look alike.
        rounds: number of transfers. A marker is one byte per round, and a coordinate needs several bytes.
        wrong_nbytes: number of wrong bytes.
        row: coordinate in the destination of the first wrong byte; None if no byte is wrong, or if it is padding.
        held: coordinate in the source of the byte that arrived there instead, if markers show it.
        wrong: the first wrong byte and the first stray in words, or None.
        stray: the first byte outside the transfer's rows that changed, with its values before and after, or None.
        stray_nbytes: number of such bytes that changed; if only checksums show them, bytes of their pages.
        watched_nbytes: number of watched bytes outside the blocks' own content.
        unwritten: heads that the destination holds, and that no unit of the program writes; ``str`` says it in words.
            Such a program is legal, so ``ok`` does not depend on it.
    """

    ok: bool
    blocks: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes: int
    markers: bool
    rounds: int
    wrong_nbytes: int = 0
    row: Row | None = None
    held: Row | None = None
    wrong: str | None = None
    stray: Stray | None = None
    stray_nbytes: int = 0
    watched_nbytes: int = 0
    unwritten: tuple[UnwrittenHeads, ...] = ()

    def __str__(self) -> str:
        """Return the findings in words."""
        watched, stray = (
            f"{self.watched_nbytes:,} bytes around them are unchanged",
            f"{self.stray_nbytes:,} around them",
        )
        said = [f"{self.nbytes:,} bytes arrived where they belong", *([watched] if self.watched_nbytes else [])]
        if not self.ok:
            said = [f"{self.wrong_nbytes:,} of {self.nbytes:,} bytes are wrong, {stray} changed: {self.wrong}"]
        return "; ".join((*said, *map(str, self.unwritten)))

    def _repr_html_(self) -> str:
        from kvplan.draw.notebook import verification_html

        return verification_html(self)
