"""What a device can do: published peaks, measured rates, the calibration of this machine."""
