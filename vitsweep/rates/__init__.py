"""What a device can do: published figures, and rates measured now."""
