"""From planned cells to submitted job arrays."""
