"""Benchmarks, calibration, and what of this machine is in the way."""
