"""A training in progress beside its plain model: losses and gradients at today's weights."""
