"""Benchmarks, calibration, and the doctor that finds why transfers on this machine are slow."""
