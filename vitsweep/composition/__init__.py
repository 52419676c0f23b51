"""From overrides to cells: the only room that knows Hydra's composition."""
