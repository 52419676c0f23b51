"""A sweep as one archive whose claims another laboratory can measure again."""
