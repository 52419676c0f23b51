"""The chart of the Pareto front."""
