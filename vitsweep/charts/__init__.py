"""One chart per file: `draw(table) -> Figure`, nothing is read, saved or shown. No torch."""
