"""Manifests of trainings for Kubernetes, as pure functions of a request and a cluster."""
