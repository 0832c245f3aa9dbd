"""The report of runs: one HTML file that opens without a network, figures as SVG, and the same as JSON."""
