"""Lanes: the streams of one direction, the calls that are made on them, and the threads that make the calls."""
