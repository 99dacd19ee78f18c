"""Pictures as SVG text, HTML and characters, made without a drawing library."""
