"""What is kept of the forward pass: one technique per file."""
