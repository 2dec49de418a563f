"""`kvxfer bench vllm`: one engine alone, then two by each connector, with the same prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import describe_machine
from kvxfer.bench.serving.screen import Screen
from kvxfer.bench.vllm.client import EngineClient
from kvxfer.bench.vllm.connectors import CONNECTORS, Role, VllmConnector
from kvxfer.bench.vllm.engine import Engine, running
from kvxfer.bench.vllm.figures import (
    Alone,
    HandedOver,
    alone_figures,
    length_figures,
    summary_figures,
)
from kvxfer.bench.vllm.handover import blocks_held, hand_over, moved_since, read_moved
from kvxfer.bench.vllm.options import VllmOptions
from kvxfer.bench.vllm.prompts import Prompts
from kvxfer.errors import KvxferError, UsageError


def run_vllm(options: VllmOptions) -> int:
    """Run, print, write; 1 where an answer or a block's KV was wrong or a block stayed held. What
    was found until a failure is kept. Raises KvxferError."""
    options.check()
    with ExitStack() as undo:
        directory = _directory(options, undo)
        run = _Run(options, directory)
        run.alone()
        for name in options.connector:
            run.pair(CONNECTORS[name])
    return run.record.exit_code


def _directory(options: VllmOptions, undo: ExitStack) -> Path:
    if options.log_dir is None:
        return Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-vllm-")))
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("log_dir", str(options.log_dir), error.strerror or str(error)) from None
    return options.log_dir.resolve()


class _Run:
    def __init__(self, options: VllmOptions, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._screen = Screen()
        prompts = Prompts(options.model)
        self._first = prompts.next(max(options.prompt_lengths))
        """Connects two engines; not among those that are compared."""
        self._prompts = list(prompts.rounds(options.prompt_lengths, options.runs))
        self._answers: list[tuple[int, ...]] = []
        """To them, of one engine alone."""
        self.record = Record(options.json, command_line("vllm", options))

    def alone(self) -> None:
        engine = Engine("alone", self._options, self._directory)
        found = []
        with self._running([engine]):
            client = engine.client
            self.record.machine = f"{describe_machine('cpu')}, vLLM {client.version()}"
            client.complete(self._first, self._options.max_tokens)
            with self._screen.bar("one engine alone", len(self._prompts)) as step:
                for prompt in self._prompts:
                    cold = client.complete(prompt, self._options.max_tokens)
                    cached = client.complete(prompt, self._options.max_tokens)
                    found.append(Alone(len(prompt), cold, cached))
                    self._answers.append(cold.tokens)
                    step()
        self.record.add(*alone_figures(found))

    def pair(self, connector: VllmConnector) -> None:
        """A producer and a consumer."""
        producer = self._engine("kv_producer", connector)
        consumer = self._engine("kv_consumer", connector)
        with self._running([producer, consumer]):
            ends = producer.client, consumer.client
            first, _ = hand_over(*ends, self._first, self._options.max_tokens)
            found = list(self._hand_overs(connector, *ends))
            num_blocks = self._options.num_gpu_blocks_override
            held = sum(blocks_held(one, num_blocks) for one in ends)
        for length in sorted(set(self._options.prompt_lengths)):
            those = [one for one in found if one.length == length]
            self.record.add(*length_figures(connector.name, length, those))
        is_ours = connector.name == "kvxfer"
        self.record.add(*summary_figures(connector.name, found, held, first.first_token_s, is_ours))

    def _engine(self, role: Role, connector: VllmConnector) -> Engine:
        name = f"{connector.name}-{role.removeprefix('kv_')}"
        return Engine(name, self._options, self._directory, connector, role)

    @contextmanager
    def _running(self, engines: Sequence[Engine]) -> Iterator[None]:
        names = " and ".join(engine.name for engine in engines)
        self._screen.say(f"{names}: starting, which takes a minute or two")
        with ExitStack() as undo:
            with self._screen.bar(f"{names}: starting", len(engines)) as step:
                undo.enter_context(running(engines, self._options.start_timeout_s, step))
            yield

    def _hand_overs(
        self, connector: VllmConnector, producer: EngineClient, consumer: EngineClient
    ) -> Iterator[HandedOver]:
        with self._screen.bar(f"{connector.name}: hand-overs", len(self._prompts)) as step:
            for prompt, right in zip(self._prompts, self._answers, strict=True):
                yield self._one(connector, producer, consumer, prompt, right)
                step()

    def _one(
        self,
        connector: VllmConnector,
        producer: EngineClient,
        consumer: EngineClient,
        prompt: list[int],
        right: tuple[int, ...],
    ) -> HandedOver:
        before = read_moved(consumer, connector.metrics)
        kept = [one.block_digests() for one in (producer, consumer)]
        answer, prefill_s = hand_over(producer, consumer, prompt, self._options.max_tokens)
        moved = moved_since(consumer, connector.metrics, before)
        made = [
            one.block_digests() - old for one, old in zip((producer, consumer), kept, strict=True)
        ]
        whole = (len(prompt) - 1) // self._options.block_size
        if len(made[0]) < whole:
            text = f"a prompt of {len(prompt)} tokens made {len(made[0])} blocks of KV"
            raise KvxferError(f"{producer.name}: {text}, not {whole}")
        equal = len(made[0] & made[1])
        is_right = answer.tokens == right
        return HandedOver(len(prompt), prefill_s, answer, moved, is_right, whole, min(equal, whole))
