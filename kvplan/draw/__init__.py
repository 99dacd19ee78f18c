"""Pictures: SVG text, made without a drawing library."""
