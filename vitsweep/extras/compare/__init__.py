"""Two settings measured in turns, until the interval on the ratio of their throughputs is narrow."""
