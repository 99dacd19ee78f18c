"""Compare two layouts, and find a better order of axes for one of them."""
