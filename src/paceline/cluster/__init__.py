"""Facts of machines: processors, memory, links, storage, as probed, published or read from cluster.json.

Nothing here puts load on a machine; measurements belong to `bench`.
"""
