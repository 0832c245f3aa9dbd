"""Caches of samples on a node, which its ranks share, in memory or on a disk.

raw      datasets whose samples are made of bytes, which can be cached undecoded
folder   a private folder, which the last of its users removes
store    the contents of samples in such a folder
opening  the caches of a training
"""
