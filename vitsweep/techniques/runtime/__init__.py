"""Settings of a rank's process and of its host: one technique per class, by what they set."""
