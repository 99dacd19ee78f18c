"""Markers sent through live pools, and compared byte by byte."""
