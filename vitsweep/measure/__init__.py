"""What is read off a running cell, and how it becomes a record."""
