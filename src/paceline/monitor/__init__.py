"""Samples of a machine while it works: processors, memory, disks, network, ranks and GPUs."""
