"""The long life of a cache, as the command tries it: it finds nothing wrong, and would say so."""

import json

import pytest

from kvxfer.bench import residency
from kvxfer.bench.residency import ResidencyOptions, run_residency


def test_a_short_life_on_the_host_loses_and_leaks_nothing(tmp_path):
    found = tmp_path / "residency.json"
    options = ResidencyOptions(device="cpu", steps=40, blocks=200, json=found)
    assert run_residency(options) == 0
    figures = {record["metric"]: record for record in json.loads(found.read_text())}
    assert figures["blocks that lost their contents"]["value"] == 0
    assert figures["descriptors left open"]["value"] == 0
    assert all(record["ok"] for record in figures.values())


@pytest.mark.parametrize("damage", ["contents", "descriptor"])
def test_what_goes_wrong_is_told(monkeypatch, tmp_path, damage):
    kept, works = [], residency._step

    def step(cache, chance, most):
        works(cache, chance, most)
        if damage == "contents":
            cache.views[1][0][cache.committed_blocks[1] - 1, 0, 3, 5] += 1
        else:
            kept.append((tmp_path / "leak").open("w"))

    monkeypatch.setattr(residency, "_step", step)
    assert run_residency(ResidencyOptions(device="cpu", steps=5, blocks=50)) == 1
    for file in kept:
        file.close()
