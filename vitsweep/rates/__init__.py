"""What a device can do: published figures, and names of what is here."""
