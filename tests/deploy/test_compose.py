"""The compose file: valid by the Compose Specification, and its command lines are kvxfer's."""

from __future__ import annotations

import functools
import ipaddress
import subprocess

import pytest
import yaml
from support.commands import ROOT, TINY_MODEL
from support.shipped import COMPOSE, DEPLOY, compose, prometheus_config

from kvxfer.command import Settings, parse
from kvxfer.control.addresses import check_address
from kvxfer.errors import KvxferError

SERVICES = compose({})["services"]
OURS = {name: one for name, one in SERVICES.items() if one["image"] == "kvxfer:cpu"}
WORKERS = {
    name: one for name, one in OURS.items() if one.get("command", [""])[0] in ("prefill", "decode")
}


def parsed(service):
    """What kvxfer makes of a service's command line and environment: its own parser says so."""
    environment = {name: str(value) for name, value in service["environment"].items()}
    return parse_once(tuple(service["command"]), tuple(environment.items()))


@functools.cache
def parse_once(words, variables):
    from kvxfer import cli

    environment = {**dict(variables), "KVXFER_MODEL": str(TINY_MODEL)}
    settings = Settings(words[0], environment=environment)
    return parse(getattr(cli, words[0]), words[1:], settings)


def address(service):
    return service["networks"]["kvxfer"]["ipv4_address"]


def test_it_is_by_the_specification():
    spec = pytest.importorskip("compose_spec", reason="pip install compose-spec: kvxfer[test]")
    read = spec.PyCompose.from_yaml(yaml.safe_dump(compose({})))
    assert set(read.service_names()) == set(SERVICES)
    for wrong in ({"restart": "sometimes"}, {"restat": "no"}, {"ports": ["99999:1"]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            spec.PyCompose.from_yaml(yaml.safe_dump({"services": {"x": {"image": "y", **wrong}}}))


def test_no_variable_is_taken_from_whoever_calls_docker():
    """Compose does that for a variable without a value."""
    for service in SERVICES.values():
        assert None not in service.get("environment", {}).values()


def test_two_prefill_and_two_decode_workers_a_router_and_who_watches_them():
    assert set(SERVICES) == {
        "keys", "router", "prefill-0", "prefill-1", "decode-0", "decode-1", "prometheus", "grafana",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_each_worker_s_command_line_is_kvxfer_s(name):
    service = WORKERS[name]
    options = parsed(service)["options"]
    assert options.worker_id == name
    assert options.listen == f"tcp://{address(service)}:5600"
    check_address("listen", options.listen, has_keys=options.key_file is not None, binds=True)
    assert options.metrics_host == address(service)
    probe = f"http://{options.metrics_host}:{options.metrics_port}/metrics"
    assert service["environment"]["PROBE"] == probe
    assert options.kv_commit == "elastic" and options.log_format == "json"


def test_the_router_dials_each_worker_where_it_listens():
    options = parsed(OURS["router"])["options"]
    for role in ("prefill", "decode"):
        dialled = getattr(options, role)
        listening = [
            parsed(one)["options"].listen for one in WORKERS.values() if one["command"][0] == role
        ]
        assert sorted(dialled) == sorted(listening)
    assert options.host == address(OURS["router"])
    probe = f"http://{options.host}:{options.port}/ready"
    assert OURS["router"]["environment"]["PROBE"] == probe


def test_an_option_that_is_not_kvxfer_s_is_found_out():
    service = WORKERS["decode-0"]
    with pytest.raises(Exception, match="block-sise"):
        parsed({**service, "command": [*service["command"], "--block-sise=32"]})
    misspelt = {**service["environment"], "KVXFER_KV_COMIT": "all"}
    with pytest.raises(KvxferError, match="did you mean"):
        parsed({**service, "environment": misspelt})


@pytest.mark.parametrize("name", sorted(OURS.keys() - {"keys"}))
def test_keys_are_used_wherever_addresses_are_not_loopback(name):
    service = OURS[name]
    assert not ipaddress.ip_address(address(service)).is_loopback
    options = parsed(service)["options"]
    assert options.key_file and options.peer_keys and options.key_file.parent == options.peer_keys
    assert f"keys:{options.peer_keys}:ro" in service["volumes"]
    assert service["depends_on"]["keys"]["condition"] == "service_completed_successfully"


def test_the_keys_are_made_once(tmp_path):
    (script,) = OURS["keys"]["command"]
    assert OURS["keys"]["entrypoint"] == ["sh", "-c"]
    keys = tmp_path / "keys"
    said = tmp_path / "said"
    stand_in = tmp_path / "kvxfer"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >>{said}\nmkdir -p "$2" && touch "$2/$3.key"\n')
    stand_in.chmod(0o700)
    script = script.replace("/var/lib/kvxfer/keys", str(keys))
    for _ in range(2):
        subprocess.run(["sh", "-c", script], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert said.read_text() == f"keygen {keys} cluster\n"


def test_processes_come_back_and_have_time_to_drain():
    for name, service in SERVICES.items():
        assert service["restart"] == ("no" if name == "keys" else "unless-stopped")
        assert name == "keys" or "healthcheck" in service
    for name in OURS.keys() - {"keys"}:
        options = parsed(OURS[name])["options"]
        assert float(OURS[name]["stop_grace_period"].rstrip("s")) > options.shutdown_timeout_s > 0


def test_nothing_is_open_to_other_hosts_and_nobody_has_rights_to_spare():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        image, _, tag = service["image"].partition(":")
        assert tag and tag != "latest", image


def test_the_subnet_may_be_another():
    moved = compose({"KVXFER_SUBNET": "192.0.2"})
    assert "10.77" not in yaml.safe_dump(moved)
    subnet = ipaddress.ip_network(moved["networks"]["kvxfer"]["ipam"]["config"][0]["subnet"])
    for name in OURS.keys() - {"keys"}:
        assert ipaddress.ip_address(address(moved["services"][name])) in subnet


def test_what_is_mounted_is_there_and_every_volume_is_known():
    known = compose({})["volumes"]
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), volume
            else:
                assert source in known, volume
    build = OURS["router"]["build"]
    assert (COMPOSE.parent / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()


def test_prometheus_scrapes_every_process():
    targets = {
        target: group.get("labels", {})
        for job in prometheus_config()["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    router = parsed(OURS["router"])["options"]
    wanted = {f"router:{router.port}": {}}
    for name, service in WORKERS.items():
        port = parsed(service)["options"].metrics_port
        wanted[f"{name}:{port}"] = {"worker": name, "role": service["command"][0]}
    assert targets == wanted
    assert (COMPOSE.parent / "../prometheus").resolve() == DEPLOY / "prometheus"
