"""What maintainers run: the same product before and after, planted bugs, random faults."""
