"""The Grafana dashboard that ships with the package."""

from pathlib import Path

DASHBOARD = Path(__file__).parent / "grafana.json"


def read_dashboard() -> str:
    """Return the dashboard as JSON, which Grafana imports."""
    return DASHBOARD.read_text(encoding="utf-8")
