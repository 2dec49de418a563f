"""The comparison of caches: it runs the real model, and a difference is told."""

import json

import pytest

from kvxfer.bench import identity
from kvxfer.bench.identity import IdentityOptions, run_identity


@pytest.mark.slow
def test_a_cache_that_slept_is_found_identical(monkeypatch, tmp_path):
    slept = [one for one in identity.VARIANTS if "slept" in one.name]
    monkeypatch.setattr(identity, "VARIANTS", slept)
    monkeypatch.setattr(identity, "PROMPT_CHARACTERS", (150,))
    found = tmp_path / "identity.json"
    assert run_identity(IdentityOptions(device="cpu", max_new_tokens=6, json=found)) == 0
    (record,) = json.loads(found.read_text())
    assert (record["value"], record["bar"], record["runs"], record["ok"]) == (1.0, 1.0, 2, True)


def test_a_difference_is_told(monkeypatch):
    def answers(options, variant, max_new_tokens):
        same = [([1, 2], ["kv"])]
        return [same, [([1, 3], ["kv"])]] if "packed" in variant.name else [same]

    monkeypatch.setattr(identity, "_answers", answers)
    assert run_identity(IdentityOptions(device="cpu")) == 1
