"""torch's elastic agents: rendezvous, one agent per node, restarts over nodes.

Ranks on one machine without an agent are started by `launch.worker_processes`.
"""
