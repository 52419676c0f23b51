"""What changed from one sweep to another: a check for CI, a table and a page."""
