"""Transfers between processes, on one machine or two, through NIXL."""

from kvplan.nixl.agent import NixlAgent
from kvplan.nixl.nixl_transfer import NixlTransfer
from kvplan.nixl.peer import NixlPeer

__all__ = ["NixlAgent", "NixlPeer", "NixlTransfer"]
