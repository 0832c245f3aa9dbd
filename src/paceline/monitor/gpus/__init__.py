"""Sensors of GPUs: NVML, AMD's driver, and lines of nvidia-smi."""
