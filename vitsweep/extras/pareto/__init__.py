"""Which cells nothing beats in throughput, memory and accuracy together."""
