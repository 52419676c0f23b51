"""Records on disk: what a run leaves behind, and how it is read again. No torch."""
