"""From tables to pages: one HTML file, Markdown and CSV. No torch, no network."""
