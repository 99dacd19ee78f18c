"""docs/guides/describe-your-own-backend.md tells the truth: the spec it shows, and the errors it quotes."""

from __future__ import annotations

import re
import tomllib

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from tests.commands import ROOT

TEXT = (ROOT / "docs" / "guides" / "describe-your-own-backend.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| (`.*?`.*?) \|", TEXT.partition("## 7.")[2], flags=re.MULTILINE)


def test_the_spec_is_the_file():
    path, shown = re.search(r"```toml\n# (\S+)\n(.*?)```", TEXT, flags=re.DOTALL).groups()
    assert KVLayout.from_spec(ROOT / path) == KVLayout.from_spec(tomllib.loads(shown))


def array(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype)


def described(notation, tensors, **more):
    return lambda: KVLayout.from_tensors(notation, tensors, **more)


def compiled(src, dst):
    return lambda: kvplan.compile(src(), dst())


KV = described("block kv token head dim", array(4, 2, 16, 2, 64))
LATENT = described("block token dim", array(4, 16, 256), part="latent")
HEADLESS = described("block kv token dim", array(4, 2, 16, 64))
OPAQUE = described("block kv dim", array(4, 2, 64))
STRIDED = np.lib.stride_tricks.as_strided

PROVOKED = {
    "`unknown axis 'heads'` with a caret": described("block heads dim", array(4, 2, 8)),
    "`has 5 dims; the tensor's shape ... has 4`": described("block kv token head dim", array(4, 2, 16, 64)),
    "`give sizes={...} for 'block' or 'token'`": described("(block token) dim", array(64, 8)),
    "`dim of extent 192 ... cannot be ...`": described(
        "block (token head dim)", array(5, 192), sizes={"token": 4, "head": 3, "dim": 8}
    ),
    "`asks for a sequence of tensors there`": described("layer: block token dim", array(4, 16, 8)),
    "`tensor 3 has strides ..., tensor 0 has ...`": described(
        "layer: block token dim", [array(4, 16, 8)] * 3 + [array(4, 16, 16)[..., :8]]
    ),
    "`overlaps itself`, `and ... overlap`": described("block token dim", np.broadcast_to(array(1, 16, 8), (4, 16, 8))),
    "`outside its allocation`": described("block token dim", STRIDED(array(4, 16, 8), (5, 16, 8), (128, 8, 1))),
    "`the destination lacks part 'k'`": compiled(KV, LATENT),
    "`'kv' of 1152 bytes per (token, head) is not 'k' of 256`": compiled(
        described("block kv token head dim", array(4, 2, 16, 2, 256)), described("block token dim", array(4, 16, 1152))
    ),
    "`holds 256 bytes per (token, head) in the source and 512`": compiled(
        described("block token dim", array(4, 16, 256)), described("block token dim", array(4, 16, 512))
    ),
    "`no head axis; name the heads there`": compiled(KV, HEADLESS),
    "`one side's block is opaque`": compiled(HEADLESS, OPAQUE),
}  # fmt: skip


def test_every_quoted_error_is_provoked():
    assert list(PROVOKED) == QUOTED


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_error_says_what_is_quoted(quoted):
    with pytest.raises(kvplan.KVPlanError) as caught:
        PROVOKED[quoted]()
    said = " ".join(str(caught.value).split())
    quote = re.match(r"`(.*?)`", quoted)[1]
    if quote not in said:  # then its dots leave something out
        assert re.search(".*".join(map(re.escape, quote.split("..."))), said), said
