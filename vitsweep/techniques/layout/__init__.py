"""Order of the axes inside the blocks: one technique per file."""
