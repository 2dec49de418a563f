"""The training text: a folder of plays, cut into a training stream and whole held-out plays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvxfer.model.tiny.names import variants
from kvxfer.model.tiny.tokenizer import BOS_ID, EOS_ID

HELD_OUT: Final = ("macbeth_gut.txt", "two_gentlemen_of_verona_gut.txt")
"""Plays that training never sees. No other file of the corpus carries their text."""

EXCERPT_MARK: Final = "SCENE VII."
EXCERPT_BYTES: Final = 7000


@dataclass(frozen=True)
class Corpus:
    """Token ids as int16: a stream of whole plays (<bos> text <eos>), and held-out texts alone."""

    train: Tensor
    held_out: tuple[Tensor, ...]


def read_play(path: Path) -> str:
    """The text with LF line ends, no byte-order mark, and no blanks at line ends."""
    text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip() for line in text.split("\n")).strip() + "\n"


def byte_ids(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode("utf-8")), dtype=torch.uint8).to(torch.int16)


def read_corpus(directory: Path, num_variants: int, seed: int) -> Corpus:
    """Reads every *_gut.txt of `directory`; raises FileNotFoundError without the held-out plays.

    The stream holds all training plays `num_variants` times, the first time as they are and then
    with their characters renamed.
    """
    paths = sorted(directory.glob("*_gut.txt"))
    missing = set(HELD_OUT) - {path.name for path in paths}
    if missing:
        raise FileNotFoundError(f"{directory} lacks the held-out plays {sorted(missing)}")
    plays = [read_play(path) for path in paths if path.name not in HELD_OUT]
    bos, eos = torch.tensor([[BOS_ID], [EOS_ID]], dtype=torch.int16)
    parts = []
    for version in variants(plays, num_variants, seed):
        for play in version:
            parts += [bos, byte_ids(play), eos]
    held_out = tuple(byte_ids(read_play(directory / name)) for name in HELD_OUT)
    return Corpus(train=torch.cat(parts), held_out=held_out)


def windows(texts: tuple[Tensor, ...], length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [N, length] over whole windows of `texts`; each input starts with <bos>.

    Every byte of a window is predicted once, the first one from <bos> alone; what is left at a
    text's end and does not fill a window is not scored.
    """
    targets = torch.cat([text[: len(text) // length * length].view(-1, length) for text in texts])
    inputs = torch.cat([torch.full_like(targets[:, :1], BOS_ID), targets[:, :-1]], dim=1)
    return inputs.long(), targets.long()


def excerpt(directory: Path) -> str:
    """About 7 KB of the first held-out play, from a scene's head to a speech's end."""
    play = read_play(directory / HELD_OUT[0])
    start = play.index(EXCERPT_MARK)
    end = play.index("\n\n", start + EXCERPT_BYTES)
    return play[start:end] + "\n"
