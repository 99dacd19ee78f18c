"""Backends: one module an engine or attention backend, each with ``describe(tensors, ...) -> KVLayout``.

A module is imported when it is asked for; none imports torch, an engine, or another backend.
"""
