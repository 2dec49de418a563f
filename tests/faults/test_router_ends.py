"""What a router makes of an end that came without all of its tokens."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import Finished, TransferStats
from kvxfer.serve.router import Backend, Completion


@pytest.mark.parametrize("num_arrived", [0, 3, 4])
def test_an_end_without_all_tokens_is_an_error(num_arrived: int) -> None:
    completion = Completion("r", [1], Backend("out:x"), 0.0, output=[7] * num_arrived)
    completion.finish(Finished("r", "length", "", 4, 1, TransferStats(), []))
    assert completion.finished is not None
    if num_arrived == 4:
        assert (completion.finished.reason, completion.finished.error) == ("length", "")
    else:
        assert completion.finished.reason == "error"
        assert completion.finished.error == f"{num_arrived} of 4 tokens arrived"
