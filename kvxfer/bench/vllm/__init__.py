"""vLLM's engines hand over KV: `kvxfer bench vllm`. vLLM itself is imported by nothing in here."""
