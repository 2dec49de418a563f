"""Connectors: one module a transport, each with its class named `CONNECTOR` at the end.

`kvxfer.transfer.connector` holds their contract and loads them by name; nothing imports them
otherwise, so that a worker pays only for the transport it uses.
"""
