"""`kvxfer bench serving`: load on an OpenAI-compatible service, and what its clients see."""
