"""How much of a step is compiled: one technique per file."""
