"""`kvxfer doctor`: what this machine can do for KV transfer, and what is set or will be.

Each section is a function that takes what it looks at and returns `Check`s; `run` puts them
together. What needs a connector's library runs in a process of its own.
"""
