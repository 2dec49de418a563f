"""Options of what serves HTTP: defaults as vLLM's, and what is refused, in one line."""

from pathlib import Path

import pytest

from kvxfer.errors import UsageError
from kvxfer.serve.options import (
    MOST_WORKERS,
    HttpOptions,
    RouterOptions,
    ServeOptions,
    check_http,
    check_router,
    check_serve,
    is_open_to_others,
)


def router(**changes):
    fixed = {"model": Path("m"), "prefill": ("ipc:///tmp/x/p",), "decode": ("tcp://127.0.0.1:2",)}
    return RouterOptions(**(fixed | changes))


def test_defaults():
    options = HttpOptions()
    assert (options.host, options.port, options.api_key) == ("127.0.0.1", 8000, ())
    assert not options.enable_admin
    check_http(options)
    check_serve(ServeOptions())


WRONG_HTTP = [
    ("port", -1),
    ("port", 65536),
    ("max_concurrent_requests", 0),
    ("shutdown_timeout_s", -1.0),
    ("shutdown_timeout_s", float("nan")),
    ("shutdown_timeout_s", float("inf")),
    ("api_key", ("",)),
    ("api_key", ("two words",)),
    ("api_key", ("good", "schlüssel")),
    ("api_key", ("line\n",)),
]


@pytest.mark.parametrize(("field", "value"), WRONG_HTTP)
def test_http_options_that_cannot_be_are_named(field, value):
    with pytest.raises(UsageError) as refused:
        check_http(HttpOptions(**{field: value}))
    assert refused.value.field == field
    assert "schlüssel" not in str(refused.value), "keys are secrets"


WRONG_ROUTER = [
    ("prefill", ("tcp://10.1.2.3:5",)),
    ("decode", ("nonsense",)),
    ("decode", ("tcp://127.0.0.1:2", "tcp://127.0.0.1:2")),
    ("decode", ("ipc:///tmp/x/p",)),
    ("request_timeout_s", 0.0),
    ("peer_timeout_s", float("nan")),
    ("max_model_len", -1),
    ("key_file", Path("/nowhere")),
]


@pytest.mark.parametrize(("field", "value"), WRONG_ROUTER)
def test_router_options_that_cannot_be_are_named(tmp_path, field, value):
    tmp_path.chmod(0o700)
    good = {"prefill": (f"ipc://{tmp_path}/p",)}
    assert check_router(router(**good)) is None
    value = (
        tuple(one.replace("/tmp/x", str(tmp_path)) for one in value) if field == "decode" else value
    )
    with pytest.raises(UsageError) as refused:
        check_router(router(**(good | {field: value})))
    assert refused.value.field == field


@pytest.mark.parametrize("changes", [{"prefill": 0}, {"decode": -1}, {"decode": MOST_WORKERS + 1},
                                     {"start_timeout_s": 0.0}])  # fmt: skip
def test_serve_options_that_cannot_be_are_named(changes):
    with pytest.raises(UsageError) as refused:
        check_serve(ServeOptions(**changes))
    assert refused.value.field in changes


@pytest.mark.parametrize(
    ("host", "keys", "is_open"),
    [
        ("127.0.0.1", (), False),
        ("127.1.2.3", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("10.1.2.3", (), True),
        ("some.host", (), True),
        ("0.0.0.0", ("k",), False),
    ],
)
def test_an_api_that_all_may_reach_without_a_key_is_noticed(host, keys, is_open):
    assert is_open_to_others(HttpOptions(host=host, api_key=keys)) is is_open
