"""A sweep as LaTeX: its table and a paragraph of method."""
