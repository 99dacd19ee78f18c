"""Transfers by layer, written in one compiled call: for plans of one run group whose pieces have one run group each."""
