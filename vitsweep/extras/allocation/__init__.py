"""Cells on the nodes of an allocation, which any scheduler or none has granted."""
