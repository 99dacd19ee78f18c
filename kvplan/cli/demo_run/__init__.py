"""What ``kvplan demo`` runs: an engine or plain tensors, the round trip of their blocks, and its story."""
