"""Transfers between machines, through NIXL."""
