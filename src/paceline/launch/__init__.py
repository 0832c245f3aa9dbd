"""Start ranks here, over nodes or through Ray, watch them, start them again after a fault and report the cause.

What a rank computes belongs to `training`.
"""
