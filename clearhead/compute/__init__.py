"""Faster operators, the loss and the optimizers."""
