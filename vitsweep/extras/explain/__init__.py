"""Why one cell is faster than another, from steps under the profiler at the end of its runs."""
