"""The versions of vLLM that the adapters support, and what differs between them.

Source: vLLM 0.31.0, 0.32.0 and 0.33.0, ``v1/kv_offload``, ``v1/simple_kv_offload`` and
``distributed/kv_transfer/kv_connector/v1``. The adapters use more of vLLM than this table names; that is alike
in all of them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.engines.versions import VLLM, release
from kvplan.errors import KVPlanError

VARIABLE = "KVPLAN_VLLM_VERSION"
logger = logging.getLogger("kvplan.engines.vllm")


# Keys of kv_connector_extra_config that not every version has.
LOADS_IN_STEP = "load_by_layer", "sync_load_budget_bytes"  # loads of a hit in the step that found it
COUNTED_BLOCKS = ("num_cpu_blocks",)  # of the simple connector


class Version(NamedTuple):
    """A version of vLLM.

    Attributes:
        release: its number.
        lacks: keys of ``kv_connector_extra_config`` that it has no interface for.
        region_segments: whether its shared region can be made of several files, which the ranks fill together.
    """

    release: str
    lacks: tuple[str, ...]
    region_segments: bool

    def check(self, extra_config: Mapping[str, Any], keys: Sequence[str]) -> None:
        """Refuse those of the keys that this version would ignore; ``false``, ``0`` and ``null`` ask for nothing.

        Raises:
            KVPlanError: such a key is given.

        >>> VERSIONS[1].check({"load_by_layer": True}, LOADS_IN_STEP)
        Traceback (most recent call last):
            ...
        kvplan.errors.KVPlanError: kv_connector_extra_config has 'load_by_layer': True, for which vLLM 0.32.0 has no \
interface; remove it, or run vLLM 0.33.0
        """
        for key in keys:
            if key in self.lacks and extra_config.get(key):
                able = " or ".join(other.release for other in VERSIONS if key not in other.lacks)
                raise KVPlanError(
                    f"kv_connector_extra_config has {key!r}: {extra_config[key]!r}, for which vLLM {self.release} has "
                    f"no interface; remove it, or run vLLM {able}"
                )


# The releases are those of kvplan.engines.versions. docs/guides/vllm-offloading.md has this table in words; a test
# holds both.
VERSIONS = (
    Version("0.33.0", lacks=(), region_segments=True),
    Version("0.32.0", lacks=(*LOADS_IN_STEP, *COUNTED_BLOCKS), region_segments=False),
    Version("0.31.0", lacks=(*LOADS_IN_STEP, *COUNTED_BLOCKS), region_segments=False),
)


def version_of(running: str, wanted: str = "") -> Version:
    """Return the row of the table for a version of vLLM.

    A version that only begins like the row's is logged, since it was not tested. So is a row that was asked for.

    Args:
        running: the version of vLLM.
        wanted: the release whose interface it shall be taken to have; by default, that of the same first two numbers.

    Raises:
        KVPlanError: there is no such row.

    >>> version_of("0.33.0+cpu").lacks
    ()
    >>> version_of("0.30.1")
    Traceback (most recent call last):
        ...
    kvplan.errors.KVPlanError: vLLM 0.30.1 is running, and kvplan supports 0.33.0, 0.32.0, 0.31.0; install one of \
these, or set KVPLAN_VLLM_VERSION to the one whose offloading interface yours has
    """
    rows = {version.release: version for version in VERSIONS}
    if wanted:
        if wanted not in rows:
            raise KVPlanError(f"{VARIABLE} is {wanted!r}; give one of {', '.join(rows)}")
        logger.warning("vLLM %s is taken for %s, because %s says so", running, wanted, VARIABLE)
        return rows[wanted]
    number = (release(running) or ())[: VLLM.parts]
    found = next((row for row in VERSIONS if (release(row.release) or ())[: VLLM.parts] == number), None)
    if found is None:
        raise KVPlanError(
            f"vLLM {running} is running, and kvplan supports {', '.join(rows)}; install one of these, or set "
            f"{VARIABLE} to the one whose offloading interface yours has"
        )
    if running.partition("+")[0] != found.release:
        logger.warning("vLLM %s is running; kvplan was tested with %s, and takes it for that", running, found.release)
    return found


@functools.cache
def running_version() -> Version:
    """Return the row for the vLLM of this process; this imports vLLM, and logs at most once.

    The environment variable ``KVPLAN_VLLM_VERSION`` names another row.

    Raises:
        KVPlanError: kvplan does not support it.
    """
    import vllm

    return version_of(vllm.__version__, os.environ.get(VARIABLE, ""))
