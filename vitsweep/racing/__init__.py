"""Finding the fastest cell of a grid from few runs: statistics only, numbers in and decisions out."""
