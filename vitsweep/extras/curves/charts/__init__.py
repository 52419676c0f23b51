"""The chart of curves; the name of a chart is that of its file."""
