"""A sweep as one archive that another laboratory can check, and what of it is hidden."""
