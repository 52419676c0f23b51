"""The techniques, one folder per config group and one file per technique; groups never import one another."""
