"""What prefill and decode agree on about grants."""

GRANTS_AHEAD = 2
"""Prompts of a pair that have blocks, or are asked for them, before the model is free for them: as
few as keep it busy, since blocks that wait are of no use to anybody."""
