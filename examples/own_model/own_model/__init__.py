"""A package outside of vitsweep: its model, data, technique and metric in vitsweep's sweeps."""
