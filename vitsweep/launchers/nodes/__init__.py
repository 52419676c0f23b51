"""Nodes that work together: an agent on each, and authenticated connections from the first to all."""
