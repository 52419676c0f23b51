"""What a paper says of a sweep, as LaTeX."""
