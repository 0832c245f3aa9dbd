"""Histograms of weights, gradients and activations, of whole tensors under every plan."""
