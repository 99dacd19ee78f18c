"""Packed transfers: bytes are gathered into a few large slots, sent by one write a slot, and scattered by the peer."""
