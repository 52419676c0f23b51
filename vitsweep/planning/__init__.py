"""From cells to what will run: checked, frozen, without what is measured already, in blocks."""
