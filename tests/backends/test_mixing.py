"""Opaque blocks that only go to their like."""

import numpy as np
import pytest

import kvplan
from kvplan import IncompatibleLayoutsError
from kvplan.backends import (
    mla,
    quantized,
    tensorrt_llm,
    vllm,
)


def zeros(*shape):
    return np.zeros(shape, np.uint8)


APART = {
    "pages of mla, as tokens": (mla.describe(zeros(3, 64, 584), whole_blocks=True), mla.describe(zeros(3, 64, 584))),
    "pages of mla, smaller": (mla.describe(zeros(3, 64, 584), whole_blocks=True),
                              mla.describe(zeros(6, 32, 584), whole_blocks=True)),
    "an indexer's pool of larger blocks": tuple(
        tensorrt_llm.describe(zeros(n, 3, 1, 16 * 132), part="index", whole_blocks=True).slice(layers=[0])
        if n == 4 else tensorrt_llm.describe(zeros(n, 1, 1, 32 * 132), part="index", whole_blocks=True)
        for n in (4, 2)),
    "slots of half the size": (tensorrt_llm.describe(zeros(3, 4_096)), tensorrt_llm.describe(zeros(6, 2_048))),
    "NVFP4 by page and by row": (vllm.describe(zeros(3, 4, 4, 72), form="whole_blocks"),
                                 quantized.describe(zeros(3, 1_152), "nvfp4", block_tokens=4, num_kv_heads=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_these_do_not_mix(name):
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(*APART[name])
