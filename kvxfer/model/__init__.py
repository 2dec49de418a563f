"""The model's room: a directory looked at and loaded, a forward pass over the paged cache, tokens.

What is named here imports neither torch nor transformers. Workers import kvxfer.model.runner too.
"""

from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.sampling import SampleSpec
from kvxfer.model.tokenizer import Detokenizer, Tokenizer

REQUIRED_LAYOUT = ""
"""The only layout that the attention backend works with; ours takes any, by its strides."""

__all__ = ["Detokenizer", "ModelInfo", "SampleSpec", "Tokenizer", "inspect_model"]
