"""What a cell needs and how fast it is, before it runs: operators, memory, bytes sent, step time."""
