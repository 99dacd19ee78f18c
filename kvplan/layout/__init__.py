"""Layouts: the addresses of all bytes of a KV cache."""
