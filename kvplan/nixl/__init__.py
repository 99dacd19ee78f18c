"""Transfers between processes, on one machine or two, through NIXL."""

from kvplan.nixl.nixl_agent import NixlAgent
from kvplan.nixl.nixl_peer import NixlPeer
from kvplan.nixl.nixl_transfer import NixlTransfer

__all__ = ["NixlAgent", "NixlPeer", "NixlTransfer"]
