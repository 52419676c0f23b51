"""Sizes of images and numbers of tokens over the epochs of a training: one technique per file."""
