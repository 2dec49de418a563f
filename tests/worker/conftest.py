"""Clusters that leave nothing behind, and messages that are lost or sent twice."""

from support.fixtures import cluster, losing, repeating

__all__ = ["cluster", "losing", "repeating"]
