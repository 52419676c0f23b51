"""Which tokens go through the blocks in training: one technique per file."""
