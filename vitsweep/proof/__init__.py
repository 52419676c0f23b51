"""Equal before fast: a tiny twin of a cell must train as a reference model does without its techniques."""
