"""Settings that compute the same take turns in a training, until the fastest is found."""
