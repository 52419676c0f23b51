"""What is measured on a running cell, and how it becomes the metrics of a record."""
