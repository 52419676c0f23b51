"""Who runs which cell where: the grid, the plan, and the launchers."""
