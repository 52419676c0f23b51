"""Data: where images and labels come from, and which of them each replica sees."""
