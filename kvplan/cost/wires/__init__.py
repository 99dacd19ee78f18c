"""The model of a wire between machines: what a transfer takes with a descriptor for each piece, and packed."""
