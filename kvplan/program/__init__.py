"""The compiler: two layouts in, a copy program out."""
