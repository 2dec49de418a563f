"""KvxferConnector: vLLM's KV hand-over on kvxfer's endpoint, lanes, leases and control channel.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvxferConnector",
        "kv_connector_module_path": "connectors.vllm", "kv_role": "kv_producer"}'

It is an engine's connector, not a transport: kvxfer's own `--connector` refuses its name.

**Who holds what.** Each worker process of vLLM has one thread (`service`) that makes an `Endpoint`
over vLLM's own tensors and a control `Channel`, and makes every call to either. vLLM's model
thread reaches it by mailbox alone, so KV flows while the model computes. The scheduler's side
(`scheduler`) only names requests and blocks; what it decides travels to the workers with each step
(`handover.Step`).

    producer's scheduler    producer's worker        consumer's worker     consumer's scheduler
    request finished:
    offer {lease, blocks} ─▶ OFFERED
    answer: kv_transfer_params ───────── proxy ──────────────────────────▶ request arrives
                             CLAIMED ◀───────── Claim{lease} ◀──────────── claim
                                     ─────────▶ Ready{blocks, tokens}
                                                     reads ◀────────────── blocks allocated: load
                                     ◀───────── Taken
                             freed   ─────────▶ Confirmed ───────────────▶ finished_recving
    finished_sending ◀─────

**Whose blocks, for how long.**
- The producer's stay (`request_finished` returns True) until each reader has said Taken or Abort,
  or is lost: then its lease is broken, and a Taken that comes later is answered by Failed, never
  by Confirmed. So a consumer never decodes from blocks that may have been used again meanwhile;
  reading them late harms nobody else. No timer runs over a reader that lives: who is lost shows by
  heartbeats. Only a lease that nobody claims has a deadline (`lease_timeout_s`).
- The consumer's stay vLLM's `WAITING_FOR_REMOTE_KVS` until our own reads, which nobody else can
  make, have ended: a ticket of the endpoint is done only when nothing writes any more, after an
  abort and after the producer's death too.
- A load that failed is reported with its request, and its blocks where vLLM takes these; what then
  happens is vLLM's `kv_load_failure_policy`.

**What a request may name.** kv_transfer_params pass through clients' hands. They carry a lease (a
random number, good once), the addresses of the producer's ranks and what life they are in. Blocks
are named by the producer alone, over the control channel, which talks to holders of keys or to
this host only.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """vLLM is imported when its connector is asked for, not before."""
    if name != "KvxferConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connectors.vllm.connector import KvxferConnector

    return KvxferConnector
