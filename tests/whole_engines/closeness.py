"""Comparison of answers in 16 bits, where another batch or another split of a prompt rounds otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Log probabilities: two tokens that are nearer may change places. Random tokens of these models are 3 and more apart.
NEAR = 0.3


def first_difference(tokens: list[int], wanted: list[int]) -> int | None:
    """Return the first place where two answers differ, or None.

    >>> first_difference([4, 5, 6], [4, 5, 6]), first_difference([4, 5, 6], [4, 7, 8])
    (None, 1)
    """
    return next((k for k, (one, other) in enumerate(zip(tokens, wanted, strict=True)) if one != other), None)


def gap(answer: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Return how much less likely than its choice the wanted answer's engine found the other token.

    It is 0 for equal answers, and infinite for a token that is not among the most likely ones. Tokens after the first
    difference have other prompts, and say nothing.

    Raises:
        ValueError: the wanted answer has a log probability that is not a number: its engine lost all it knew, and
            every answer would be equal to it.

    >>> wanted = {"tokens": [4, 5], "likely": [[[4, -0.1]], [[5, -1.0], [7, -1.25]]]}
    >>> gap({"tokens": [4, 5]}, wanted), gap({"tokens": [4, 7]}, wanted), gap({"tokens": [9, 5]}, wanted)
    (0.0, 0.25, inf)
    """
    if any(math.isnan(chance) for step in wanted["likely"] for _, chance in step):
        raise ValueError("a log probability of the wanted answer is not a number")
    place = first_difference(answer["tokens"], wanted["tokens"])
    if place is None:
        return 0.0
    likely = dict(map(tuple, wanted["likely"][place]))
    return likely[wanted["tokens"][place]] - likely.get(answer["tokens"][place], float("-inf"))
