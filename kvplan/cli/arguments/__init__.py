"""What commands read from their arguments: layouts, and values with their units."""
