"""Metrics of runs for Prometheus and Grafana: the answer to /metrics."""
