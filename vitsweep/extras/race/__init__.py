"""Finding the fastest cell of a grid by successive halving."""
