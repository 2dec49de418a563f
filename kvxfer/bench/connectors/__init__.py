"""`kvxfer bench connectors`: which connector moves KV best on this machine, and how near it comes
to what the machine can do."""
