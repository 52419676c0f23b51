"""What the classification head reads: one technique per file."""
