"""A keyword that a backend does not take is refused in the name of its own ``describe``."""

from importlib import import_module
from pkgutil import iter_modules

import pytest

import kvplan.backends

NAMES = [module.name for module in iter_modules(kvplan.backends.__path__) if not module.name.startswith("_")]
NO_HEADS, OWN_PARTS = ("mla", "state"), ("sglang", "state", "transformers")
ROWS = [
    *((name, "isa") for name in NAMES),
    *((name, "head_start") for name in NO_HEADS),
    *((name, "part") for name in OWN_PARTS),
]


@pytest.mark.parametrize(("name", "keyword"), ROWS)
def test_an_unknown_keyword_is_named(name, keyword):
    describe = import_module(f"kvplan.backends.{name}").describe
    given = (None, "fp8_ds_mla") if name == "quantized" else (None,)
    with pytest.raises(TypeError, match=rf"^describe\(\) got an unexpected keyword argument '{keyword}'"):
        describe(*given, **{keyword: 3})
