"""From how many rows on bits do not depend on the batch: tried out, not assumed."""

import logging

import pytest
import torch

from kvxfer.model.row_classes import padded_rows, stable_rows


class Moody(torch.nn.Linear):
    """A linear layer whose rows differ in the last bit for the numbers of rows in `odd`."""

    odd: frozenset[int] = frozenset()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().forward(rows)
        return torch.nextafter(out, out + 1) if len(rows) in self.odd else out


def moody(odd, in_features=16):
    torch.set_num_threads(1)
    layer = Moody(in_features, 16)
    layer.odd = frozenset(odd)
    return layer


@pytest.mark.parametrize(
    "odd, least",
    [
        ((), 4),
        ((1, 2, 3), 4),
        ((4,), 8),
        ((7,), 8),
        ((8,), 16),
        ((5, 17), 32),
        ((31,), 32),
        ((32,), None),
        ((63,), None),
    ],
)
def test_the_fewest_rows_that_come_out_alike(odd, least):
    with torch.inference_mode():
        assert stable_rows(moody(odd), 16) == least


def test_a_model_needs_what_its_most_demanding_layer_needs(caplog):
    model = torch.nn.Sequential(moody((), 8), moody((4,), 16), moody((9,), 24))
    with caplog.at_level(logging.WARNING):
        assert padded_rows(model) == 16
    assert not caplog.records


def test_where_nothing_helps_it_is_said(caplog):
    model = torch.nn.Sequential(moody((), 8), moody((64, 33), 16))
    with caplog.at_level(logging.WARNING):
        assert padded_rows(model) == 4
    (record,) = caplog.records
    assert "depend on the number of rows" in record.message.replace("depends", "depend")
