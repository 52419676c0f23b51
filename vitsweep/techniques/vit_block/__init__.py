"""How the branches of a block, attention and MLP, are put together: one technique per file."""
