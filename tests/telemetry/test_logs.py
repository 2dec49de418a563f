"""A line of the log, for people and for machines."""

import json
import logging
import sys

import pytest

from kvxfer.telemetry.logs import LONGEST_REQUEST_ID, JsonLines, about, as_set_up, set_up_logging

logger = logging.getLogger("kvxfer.test")


@pytest.fixture
def stream(monkeypatch, capsys):
    """What was logged to stderr, and the root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield lambda: capsys.readouterr().err
    root.handlers = handlers
    root.setLevel(level)


def test_a_json_line_has_its_fields_and_the_request(stream):
    set_up_logging("decode", "decode-0", "json")
    logger.warning("request %s: %s", "r-1", "it\nbroke \x1b[31m", extra=about("r-1"))
    logger.info("ready")
    first, second = (json.loads(line) for line in stream().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "WARNING",
        "role": "decode",
        "worker_id": "decode-0",
        "logger": "kvxfer.test",
        "message": "request r-1: it\\nbroke \\x1b[31m",
        "request_id": "r-1",
    }
    assert "request_id" not in second and second["message"] == "ready"


def test_what_a_client_chose_stays_one_bounded_line(stream):
    set_up_logging("decode", "decode-0", "json")
    logger.warning("x", extra=about('"}\n{"level": "CRITICAL' + "y" * 5000))
    (line,) = stream().splitlines()
    assert len(json.loads(line)["request_id"]) <= LONGEST_REQUEST_ID + 10
    assert "\n" not in json.loads(line)["request_id"]


def test_an_exception_is_a_field(stream):
    try:
        raise RuntimeError("why")
    except RuntimeError:
        record = logger.makeRecord("n", logging.ERROR, "f", 1, "it broke", None, sys.exc_info())
    told = json.loads(JsonLines("prefill", "p").format(record))
    assert told["message"] == "it broke"
    assert told["exception"].endswith("RuntimeError: why")


def test_text_is_as_it_was(stream):
    set_up_logging("prefill", "prefill-0", "text")
    logger.info("ready %d", 5)
    assert stream().rstrip().endswith(" prefill INFO ready 5")


def test_what_was_set_up_last_is_what_counts(stream):
    set_up_logging("decode", "", "text")
    set_up_logging("decode", "decode-1", "json")
    logger.info("once")
    (line,) = stream().splitlines()
    assert json.loads(line)["worker_id"] == "decode-1"
    assert as_set_up() == ("decode-1", "json"), "for ranks in processes of their own"
    set_up_logging("decode", "decode-1", "text")
    assert as_set_up() == ("", "text")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_log_stays_bounded(stream, log_format):
    set_up_logging("decode", "decode-0", log_format)
    for _ in range(500):
        logger.warning("a peer made us say so")
    assert 50 < len(stream().splitlines()) < 200
