"""A mirror of the records in Weights & Biases (`tracker=wandb`)."""
