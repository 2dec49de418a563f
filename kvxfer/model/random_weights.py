"""A model directory with random weights: for measuring, where what a model says does not matter.

Weights are drawn as bits, at the speed of the generator: of a bfloat16 the sign and the mantissa
are random and the exponent is given, so that a weight is 2^-6 to 2^-5 in size (a root mean square
of 0.024, what trained models of this width begin with). 1.2 billion take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIGN_AND_MANTISSA = 0x807F
EXPONENT = (127 - 6) << 7


def write_random_model(directory: Path, fields: Mapping[str, Any], seed: int = 0) -> Path:
    """Write config.json and model.safetensors in bfloat16, without a tokenizer; returns
    `directory`, which is made.

    `fields` are those of config.json, `model_type` among them; a causal language model. The same
    fields and seed give the same bytes. Vectors (the norms' scales) are ones. Imports transformers.
    """
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import save_file

    auto: Any = transformers.AutoConfig
    config = auto.for_model(**fields)
    config.dtype = torch.bfloat16
    factory: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    source = np.random.SFC64(seed)
    tensors = {}
    for name, weight in model.named_parameters():  # a tied one is named once
        if weight.ndim < 2:
            tensors[name] = torch.ones(weight.shape, dtype=torch.bfloat16)
            continue
        words = source.random_raw(-(-weight.numel() // 4))
        bits = words.view(np.uint16)[: weight.numel()]
        bits &= SIGN_AND_MANTISSA
        bits |= EXPONENT
        tensors[name] = (
            torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(weight.shape)
        )
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    return directory
