"""Clusters that leave nothing behind."""

from support.fixtures import cluster

__all__ = ["cluster"]
