"""Files for TensorBoard: scalars, histograms, images and graphs."""
