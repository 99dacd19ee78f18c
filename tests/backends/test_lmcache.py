"""lmcache: objects and formats that no one layout can hold, and what to do instead."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvplan import LayoutError
from kvplan.backends import lmcache

TWO = np.zeros((2, 3, 8, 16), np.float16)
GROUPS = SimpleNamespace(metadata=SimpleNamespace(shapes=[(2, 3, 8, 16), (2, 5, 8, 32)]), get_tensor=None)
FREED = SimpleNamespace(tensor=None, get_tensor=None)
PLANES = [(np.zeros((3, 4, 1, 512), np.int16), np.zeros((3, 4, 1, 64), np.int16))]


@pytest.mark.parametrize(("given", "options", "message"), [
    ([GROUPS], {"heads": 2}, "holds 2 kernel groups .* name one with group="),
    ([FREED], {"heads": 2}, "has no tensor: it was freed"),
    (PLANES, {"engine_format": "NL_X_NP_X_NB_BS_ONE_HS"}, r"NP planes .* 'NL_X_NB_BS_ONE_HS' with a part"),
    ([TWO] * 4, {"engine_format": "NL_X_NB_BS_NH_HS"}, r"lists K and V tensors one by one; .* part='k'"),
])  # fmt: skip
def test_refused_with_what_to_do(given, options, message):
    with pytest.raises(LayoutError, match=message):
        lmcache.describe(given, **options)
