"""Renames the characters of a play, so that a model must read names instead of recalling them.

Trained on the plays as they are, a small model learns who speaks in which play by heart, and puts
those names into text where nobody bears them. Each variant of the corpus gives every character a
new name, the same one throughout a play; then only the context says who may speak next.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

SPEAKER_LINE: Final = re.compile(r"^[ \t]*([A-Z][A-Za-z' ]{1,30})\.?[ \t]*$", re.MULTILINE)
LEAST_SPEECHES: Final = 4
LEAST_LETTERS: Final = 4
HEAD_LETTERS: Final = (2, 4)
TAIL_LETTERS: Final = (3, 5)


def lowercase_words(texts: Iterable[str]) -> set[str]:
    """Words written in lower case anywhere: what is among them is no proper name."""
    return {word for text in texts for word in re.findall(r"\b[a-z]+\b", text)}


def speakers(text: str, common: set[str]) -> list[str]:
    """Proper names, in capitals, that stand in at least LEAST_SPEECHES speaker lines; sorted."""
    lines = SPEAKER_LINE.findall(text)
    counts = Counter(word for line in lines for word in set(re.findall(r"[A-Za-z]+", line)))
    return sorted(
        {
            word.upper()
            for word, count in counts.items()
            if count >= LEAST_SPEECHES and len(word) >= LEAST_LETTERS and word.lower() not in common
        }
    )


class Renamer:
    """One text, split once at its characters' names; `renamed` writes it out with new ones."""

    def __init__(self, text: str, names: list[str]) -> None:
        self.names = names
        forms = [form for name in names for form in (name, name.capitalize())]
        # Odd pieces are names. A pattern that cannot match leaves a text without names whole.
        pattern = r"\b(" + "|".join(forms) + r")\b" if forms else r"((?!))"
        self._pieces = re.split(pattern, text)

    def renamed(self, new_names: Mapping[str, str]) -> str:
        """The text with each name of `names` replaced; each keeps its case."""
        forms = dict(new_names)
        forms |= {old.capitalize(): new.capitalize() for old, new in new_names.items()}
        pieces = self._pieces.copy()
        pieces[1::2] = [forms[piece] for piece in pieces[1::2]]
        return "".join(pieces)


def invented_names(count: int, pool: list[str], chance: random.Random) -> list[str]:
    """Distinct names in capitals: the head of one name of the pool and the tail of another."""
    names: dict[str, None] = {}
    while len(names) < count:
        head = chance.choice(pool)[: chance.randint(*HEAD_LETTERS)]
        names[head + chance.choice(pool)[-chance.randint(*TAIL_LETTERS) :]] = None
    return list(names)


def variants(texts: list[str], count: int, seed: int) -> list[list[str]]:
    """`count` versions of all texts: the first as it is, the others each with names of its own."""
    common = lowercase_words(texts)
    renamers = [Renamer(text, speakers(text, common)) for text in texts]
    pool = sorted({name for renamer in renamers for name in renamer.names})
    chance = random.Random(seed)
    versions = [list(texts)]
    for _ in range(count - 1):
        version = []
        for renamer in renamers:
            new = invented_names(len(renamer.names), pool, chance)
            version.append(renamer.renamed(dict(zip(renamer.names, new, strict=True))))
        versions.append(version)
    return versions
