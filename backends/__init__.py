"""Backends: one module for each engine or attention backend, with ``describe(tensors, ...) -> KVLayout``.

A module is imported when it is first used. It imports neither torch nor an engine nor another backend.
"""
