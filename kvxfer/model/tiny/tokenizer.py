"""Makes the bundled model's tokenizer: one token a byte, the token's id is the byte's value.

    python -m kvxfer.model.tiny.tokenizer DIR

Facts relied on (tokenizers 0.23): the ByteLevel pre-tokenizer writes each byte of the UTF-8 text
as one printable character, so a BPE with those 256 characters and no merges is a byte tokenizer;
added tokens get the ids that follow the vocabulary in the order in which they are added.
"""

import argparse
import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

NUM_BYTES: Final = 256
BOS, EOS, PAD, SPARE = "<bos>", "<eos>", "<pad>", "<spare>"
BOS_ID, EOS_ID, PAD_ID, SPARE_ID = range(NUM_BYTES, NUM_BYTES + 4)
VOCAB_SIZE: Final = NUM_BYTES + 4
MAX_LENGTH: Final = 2048
"""Tokens of the longest context that the model was trained on, <bos> included."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ (message['name'] or message['role']) | upper }}.\n{{ message['content'] }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT.\n{% endif %}"
)
"""Speeches of a play: what the model was trained on. It knows no roles."""


def byte_characters() -> list[str]:
    """The character that ByteLevel writes for each byte value 0..255.

    Printable Latin-1 stands for itself; every other byte takes the next code point from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, spare = [], NUM_BYTES
    for byte in range(NUM_BYTES):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters


def build_tokenizer() -> Tokenizer:
    """A tokenizer that prepends <bos> and decodes any valid UTF-8 text back exactly."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = [AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, PAD, SPARE)]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into an existing directory."""
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the byte-level tokenizer's two files.")
    parser.add_argument("directory", type=Path)
    save_tokenizer(parser.parse_args().directory)


if __name__ == "__main__":
    main()
