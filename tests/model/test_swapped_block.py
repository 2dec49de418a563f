"""One wrong block of KV: the bundled model's answer shows it, and digests find the block."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from support.models import GREEDY, HostEngine, HostSequence

from kvxfer.cache.table import BlockTable
from kvxfer.model import Tokenizer, inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.model.tiny import MODEL_DIR
from kvxfer.transfer.digest import block_digests

TRIES = 20
NEW_TOKENS = 64
BLOCK_SIZE = 16
PROMPT_BYTES = (200, 600)
MAX_BLOCKS = -(-(PROMPT_BYTES[1] + 1 + NEW_TOKENS) // BLOCK_SIZE)


@dataclass
class Try:
    """A prompt's answer from its own blocks, and from a table with the donor's block `index`."""

    intact: HostSequence
    donor: HostSequence
    swapped: HostSequence
    index: int


class Bundled:
    """The bundled model over one cache, with the tries prefilled and decoded."""

    def __init__(self) -> None:
        runner = ModelRunner.load(inspect_model(MODEL_DIR), "cpu", None, threads=1)
        self.tokenizer = Tokenizer.load(MODEL_DIR)
        self.engine = HostEngine(runner, num_blocks=1 + (3 * TRIES + 3) * MAX_BLOCKS)
        self._next_block = 1
        self._text = (MODEL_DIR / "excerpt.txt").read_text(encoding="utf-8")
        chance = random.Random(20)
        self.tries = [self._prefill(chance) for _ in range(TRIES)]
        for start in range(0, TRIES, 5):
            batch = [s for t in self.tries[start : start + 5] for s in (t.intact, t.swapped)]
            self.engine.decode(batch, NEW_TOKENS - 1)

    def blocks(self, count: int) -> list[int]:
        self._next_block += count
        return list(range(self._next_block - count, self._next_block))

    def _prefill(self, chance: random.Random) -> Try:
        size = chance.randint(*PROMPT_BYTES)
        starts = chance.sample(range(len(self._text) - size), 2)
        intact, donor = (
            self.engine.prefill(
                self.tokenizer.encode(self._text[start : start + size]),
                self.blocks(MAX_BLOCKS),
                chunk=128,
                sample=GREEDY,
            )
            for start in starts
        )
        whole = min(intact.num_prompt, donor.num_prompt) // BLOCK_SIZE
        index = whole - chance.randint(1, 4)
        # The answer, and what the prompt leaves over, go to blocks of its own.
        shared = intact.num_prompt // BLOCK_SIZE
        table = [*intact.tables[0].blocks[:shared], *self.blocks(MAX_BLOCKS - shared)]
        for view in self.engine.views[0]:
            view[table[shared]] = view[intact.tables[0].blocks[shared]]
        table[index] = donor.tables[0].blocks[index]
        swapped = HostSequence(list(intact.tokens), [BlockTable(table)], intact.num_prompt)
        return Try(intact, donor, swapped, index)


@pytest.fixture(scope="module")
def bundled() -> Bundled:
    return Bundled()


def test_a_swapped_block_changes_the_answer(bundled):
    texts = [
        [bundled.tokenizer.decode(s.answer) for s in (t.intact, t.swapped)] for t in bundled.tries
    ]
    changed = sum(intact != swapped for intact, swapped in texts)
    assert changed >= 18, f"{changed} of {TRIES} answers changed"


def test_the_same_bytes_in_another_block_do_not(bundled):
    """The control: a table of copies of all the prompt's blocks gives the same answer."""
    for one in bundled.tries[:3]:
        intact, copies = one.intact, bundled.blocks(MAX_BLOCKS)
        for view in bundled.engine.views[0]:
            view[copies] = view[list(intact.tables[0].blocks)]
        again = HostSequence(
            intact.tokens[: intact.num_prompt + 1], [BlockTable(copies)], intact.num_prompt
        )
        bundled.engine.decode([again], NEW_TOKENS - 1)
        assert again.answer == intact.answer


def test_digests_find_the_swapped_block_wherever_it_is(bundled):
    chance = random.Random(21)
    for number, one in enumerate(bundled.tries):
        views, num_tokens = bundled.engine.views[0], one.intact.num_prompt
        table = list(one.intact.tables[0].blocks)
        expected = block_digests(views, table, num_tokens)
        common = min(one.intact.num_prompt, one.donor.num_prompt) // BLOCK_SIZE
        anywhere = range(common) if number == 0 else [chance.randrange(common)]
        for index in {one.index, *anywhere}:
            wrong = [*table[:index], one.donor.tables[0].blocks[index], *table[index + 1 :]]
            found = block_digests(views, wrong, num_tokens)
            differing = [
                i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]
            ]
            assert differing == [index]
