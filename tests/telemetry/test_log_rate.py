"""What a peer makes a worker say is bounded."""

import logging

from kvxfer.telemetry.log_rate import BURST, LINES_A_SECOND, LONGEST, BoundedLog, one_line


class Lines:
    """A logger whose lines pass a BoundedLog; time goes by as the test says."""

    def __init__(self):
        self.now_s = 0.0
        self.kept = []
        self.logger = logging.Logger("peer", logging.INFO)
        handler = logging.Handler()
        handler.emit = lambda record: self.kept.append(record.getMessage())
        handler.addFilter(BoundedLog(lambda: self.now_s))
        self.logger.addHandler(handler)


def test_a_flood_is_cut_and_the_next_line_says_how_many_were_left_out():
    lines = Lines()
    for index in range(3):
        for _ in range(10_000 if index == 0 else 1):
            lines.logger.warning("from %s: nonsense", "in:00")
        lines.now_s += 1 / LINES_A_SECOND
    assert len(lines.kept) == BURST + 2
    assert (
        lines.kept[-2] == f"from in:00: nonsense (and {10_000 - BURST} more such lines, left out)"
    )
    assert lines.kept[-1] == "from in:00: nonsense"


def test_one_place_does_not_silence_another_and_errors_always_pass():
    lines = Lines()
    for _ in range(BURST + 50):
        lines.logger.warning("nonsense")
        lines.logger.error("conservation is broken")
    lines.logger.warning("peer is lost")
    assert lines.kept.count("nonsense") == BURST
    assert lines.kept.count("conservation is broken") == BURST + 50
    assert lines.kept[-1] == "peer is lost"


def test_what_a_peer_sends_stays_one_short_printable_line():
    assert one_line("a\nb\x1b[2J\udc80 é") == "a\\nb\\x1b[2J\\udc80 é"
    long = one_line("x" * (LONGEST + 7))
    assert len(long) < LONGEST + 40
    assert long.endswith("... (7 characters more)")
    lines = Lines()
    lines.logger.warning("it left: %s", "\n2026-01-01 decode INFO ready" * 1000)
    assert "\n" not in lines.kept[0]
