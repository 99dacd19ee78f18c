"""Pictures as SVG text, as HTML and as characters, made without a drawing library."""
