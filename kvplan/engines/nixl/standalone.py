"""The agent behind kvplan's where NIXL is not installed: it knows peers of this machine only, and moves nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.base.quoting import quoted
from kvplan.engines.nixl.descriptor_rows import KINDS
from kvplan.errors import KVPlanError, LayoutError, PathError

TAG = b"kvplan.standalone/1|"
INSTALL = "install NIXL to move it: pip install nixl"


class DescriptorList(list[tuple[Any, ...]]):
    """A list of (address, bytes, device), with the methods of NIXL's lists that kvplan reads.

    Args:
        kind: ``"DRAM"`` or ``"VRAM"``.
        rows: the rows; a fourth column is ignored.

    >>> made = DescriptorList("cpu", [(4096, 16, 0, "")])
    >>> made.getType(), made.descCount(), made[0]
    ('DRAM', 1, (4096, 16, 0))
    """

    def __init__(self, kind: str, rows: Iterable[Sequence[Any]]) -> None:
        if kind not in KINDS:
            raise KVPlanError(f"the kind of memory is {kind!r}; expected one of {', '.join(KINDS)}")
        super().__init__((int(address), int(nbytes), int(device)) for address, nbytes, device, *_ in rows)
        self._kind = KINDS[kind]

    def getType(self) -> str:  # noqa: N802  # NIXL's name
        """Return the kind of memory."""
        return self._kind

    def descCount(self) -> int:  # noqa: N802  # NIXL's name
        """Return the number of descriptors."""
        return len(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return DescriptorList, (self._kind, list(self))


@dataclass
class Prepared:
    """The handle of a prepared list, which needs no memory."""

    released: bool = False

    def release(self) -> None:
        """Mark it as released."""
        self.released = True


class StandaloneAgent:
    """An agent without NIXL, with the methods of ``nixl_agent`` that engines call.

    Args:
        name: name of the agent.
        config, instantiate_all: not used; there are no backends.
    """

    def __init__(self, name: str, config: Any = None, instantiate_all: bool = False) -> None:
        del config, instantiate_all
        self.name = name
        self.backends: dict[str, int] = {}
        self._known: set[str] = set()

    def get_plugin_list(self) -> list[str]:
        """Return no plugins."""
        return []

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> DescriptorList:
        """Return a list for registration."""
        return _list_of(descs, mem_type)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> DescriptorList:
        """Return a list for transfers."""
        return _list_of(descs, mem_type)

    def get_serialized_descs(self, descs: DescriptorList) -> bytes:
        """Return a list as bytes."""
        return pickle.dumps((descs.getType(), list(descs)))

    def deserialize_descs(self, serialized_descs: bytes) -> DescriptorList:
        """Return a list from bytes of a trusted peer, as NIXL's agent does."""
        return DescriptorList(*pickle.loads(serialized_descs))  # noqa: S301  # NIXL's own form

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()) -> Any:
        """Return the list; kvplan's agent remembers it."""
        del backends
        return self.get_reg_descs(reg_list, mem_type)

    def deregister_memory(self, dereg_list: Any, backends: Sequence[str] = ()) -> None:
        """Do nothing; kvplan's agent forgets it."""

    def get_agent_metadata(self) -> bytes:
        """Return the name."""
        return TAG + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Return the name of a peer; raise LayoutError if the metadata is not of an agent without NIXL."""
        if not metadata.startswith(TAG):
            raise LayoutError(
                f"the metadata is {quoted(metadata)}, of an agent with NIXL; this one has none: {INSTALL}"
            )
        name = metadata.removeprefix(TAG).decode(errors="replace")
        self._known.add(name)
        return name

    def remove_remote_agent(self, agent: str) -> None:
        """Forget a peer."""
        self._known.discard(agent)

    def check_remote_metadata(self, agent: str, descs: Any = None) -> bool:
        """Return whether a peer is known."""
        del descs
        return agent in self._known

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        """Do nothing; kvplan has connected when the peer was added."""

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> Prepared:
        """Return a handle; kvplan's agent keeps the rows."""
        del xfer_list, mem_type, backends
        if agent_name not in {"", "NIXL_INIT_AGENT", self.name} and agent_name not in self._known:
            raise KVPlanError(f"no agent {agent_name!r} has been added")
        return Prepared()

    def make_prepped_xfer(self, *given: Any) -> Any:
        """Raise PathError: kvplan has not taken the transfer over."""
        del given
        raise PathError(f"kvplan cannot move this transfer; {INSTALL}")

    def initialize_xfer(self, *given: Any) -> Any:
        """Raise PathError: kvplan has not taken the transfer over."""
        return self.make_prepped_xfer(*given)


def _list_of(descs: Any, mem_type: str | None) -> DescriptorList:
    if isinstance(descs, DescriptorList):
        return descs
    if hasattr(descs, "data_ptr") or (len(descs) and hasattr(descs[0], "data_ptr")):
        tensors = [descs] if hasattr(descs, "data_ptr") else list(descs)
        if not all(one.is_contiguous() for one in tensors):
            raise KVPlanError("a tensor is not contiguous; give contiguous tensors, or lists of addresses")
        gpu = tensors[0].get_device()
        rows = [(one.data_ptr(), one.numel() * one.element_size(), max(one.get_device(), 0)) for one in tensors]
        return DescriptorList("DRAM" if gpu < 0 else "VRAM", rows)
    if mem_type is None:
        raise KVPlanError("a list of addresses needs mem_type: 'DRAM' or 'VRAM'")
    return DescriptorList(mem_type, np.asarray(descs).tolist() if isinstance(descs, np.ndarray) else descs)
