"""Checks before the first step: ranks and links, initial weights, what the first loss consists of."""
