"""Clusters that leave nothing behind."""

from support.fixtures import cluster, losing

__all__ = ["cluster", "losing"]
