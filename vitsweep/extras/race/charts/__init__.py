"""The chart of a race; its name is that of its file."""
