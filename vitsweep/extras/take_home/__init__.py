"""One file of plain PyTorch that trains as a cell does, and the proof that it does."""
