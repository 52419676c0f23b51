"""How much of a step is compiled or captured: one technique per file."""
