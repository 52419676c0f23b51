"""One run of one cell: its processes, their supervision, and the record of how it ended."""
