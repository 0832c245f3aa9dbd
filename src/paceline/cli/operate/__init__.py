"""The commands of the panel Operate: queues, run folders and faults."""
