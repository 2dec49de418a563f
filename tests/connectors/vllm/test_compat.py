"""What vLLM says of its caches, read by the connector's shim: with vLLM installed only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvxfer.errors import UsageError

pytest.importorskip("vllm", reason="vLLM is not in this environment")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
compat = pytest.importorskip("connectors.vllm.compat")

FULL = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def config(*specs, names=(("a", "b"), ("c",))):
    groups = [
        interface.KVCacheGroupSpec(list(layers), spec)
        for layers, spec in zip(names, specs, strict=False)
    ]
    return interface.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def test_attention_is_described():
    window = interface.SlidingWindowSpec(**FULL, sliding_window=32)
    full, sliding = compat.layer_groups(config(interface.FullAttentionSpec(**FULL), window))
    assert full.names == ("a", "b") and (full.head_dim_k, full.head_dim_v) == (64, 64)
    assert sliding.window == 32 and sliding.block_size == 16
    latent = interface.MLAAttentionSpec(**{**FULL, "num_kv_heads": 1, "head_size": 576})
    (mla,) = compat.layer_groups(config(latent))
    assert mla.is_mla and (mla.head_dim_k, mla.head_dim_v) == (576, 0)
    assert compat.num_kv_heads(None, [mla]) == 1


def test_state_that_is_not_kv_blocks_is_refused():
    state = interface.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(UsageError, match=r"MambaSpec.*not KV blocks"):
        compat.layer_groups(config(interface.FullAttentionSpec(**FULL), state))


def test_pages_that_are_not_known_are_refused():
    chunked = interface.ChunkedLocalAttentionSpec(**FULL, attention_chunk_size=64)
    with pytest.raises(UsageError, match=r"ChunkedLocalAttentionSpec.*is not known"):
        compat.layer_groups(config(chunked))
    mode = interface.KVQuantMode.INT8_PER_TOKEN_HEAD
    with pytest.raises(UsageError, match="packed"):
        compat.layer_groups(config(interface.FullAttentionSpec(**FULL, kv_quant_mode=mode)))


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0"])
def test_other_versions_are_refused(version: str):
    with pytest.raises(UsageError, match=r"vllm.*needs one of 0.32, 0.33"):
        compat.check_version(version)
    compat.check_version("0.32.0")
    compat.check_version("0.33.1.dev3")


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("kv_transfer_config", "enable_permute_local_kv", True),
        ("kv_transfer_config", "kv_buffer_device", "cuda"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_by_name(where: str, name: str, value: object):
    whole = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1),
        kv_transfer_config=SimpleNamespace(enable_permute_local_kv=False, kv_buffer_device="cpu"),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    compat.check_config(whole)
    setattr(getattr(whole, where), name, value)
    with pytest.raises(UsageError, match=name):
        compat.check_config(whole)


def test_the_connector_is_one_of_vllms_with_hybrid_memory():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    from connectors.vllm import KvxferConnector

    assert supports_hma(KvxferConnector) and KvxferConnector.supports_sleep_mode()
    assert not KvxferConnector.__abstractmethods__


def test_stats_add_up():
    from connectors.vllm.metrics import KvxferStats

    one = {"transfer_duration": [0.5], "bytes_transferred": [2**20], "num_descriptors": [8]}
    both = KvxferStats({**one, "num_failed_transfers": []}).aggregate(
        KvxferStats({**one, "num_failed_transfers": [1]})
    )
    found = both.reduce()
    assert found["Num successful transfers"] == 2 and found["Num failed transfers"] == 1
    assert found["Throughput (MB/s)"] == 2.0 and not both.is_empty()
