"""Charts of `explain`; the name of a chart is that of its file."""
