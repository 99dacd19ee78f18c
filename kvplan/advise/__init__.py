"""Compare two layouts, and advise a better order of axes for one of them."""
