"""Run ``kvplan demo``: an engine or plain tensors, the round trip of their blocks, and its results as text."""
