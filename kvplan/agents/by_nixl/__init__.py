"""The transport ``nixl`` of agents: a descriptor for each piece, or packed."""
