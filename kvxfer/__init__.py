"""kvxfer: disaggregated prefill/decode KV transfer on KV caches that grow."""

__version__ = "0.1.0"
