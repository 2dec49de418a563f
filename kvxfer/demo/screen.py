"""What the demo shows a person: progress, streaming text, a table, a picture of the growth."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvxfer.demo.results import DemoResult, Numbers
from kvxfer.serve.text import TextStream

MIB = 1 << 20
PROMPT_TAIL = 150
BAR_WIDTH = 40


class Screen:
    """All output of the demo; with `quiet` only what went wrong, on stderr."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(quiet=quiet, highlight=False)
        self._shown: TextStream | None = None

    def say(self, text: str) -> None:
        self._console.print(text)

    def step(self, worker: str, text: str) -> None:
        self._console.print(f"[dim]{worker:>8}: {escape(text)}[/dim]")

    def stream(self, streams: Sequence[TextStream]) -> None:
        """Print new text: of one completion until it has ended, then of the next."""
        for stream in streams:
            if stream is not self._shown and self._shown in streams and not self._ended():
                break
            fresh = stream.new_text()
            if not fresh:
                continue
            if stream is not self._shown:
                self._begin(stream)
            self._console.print(f"[bold]{escape(fresh)}[/bold]", end="")

    def _ended(self) -> bool:
        return self._shown is None or self._shown.completion.finished is not None

    def _begin(self, stream: TextStream) -> None:
        self._shown = stream
        name, tail = stream.completion.request_id, stream.prompt[-PROMPT_TAIL:]
        self._console.print(f"\n\n[cyan]{name}[/cyan] [dim]…{escape(tail)}[/dim]", end="")

    def report(self, result: DemoResult) -> None:
        self._console.print("\n")
        self._console.print(_request_table(result))
        self._console.print(_cache_table(result))
        picture = _growth_picture(result.before["decode"], result.after["decode"])
        for line in [*picture, *_verdict(result)]:
            self._console.print(line)


def _request_table(result: DemoResult) -> Table:
    table = Table(title=f"Handed over from prefill to decode (lane {result.lane})")
    table.add_column("request", no_wrap=True)
    for name in ("prompt tokens", "TTFT ms", "MB", "GB/s", "runs", "blocks"):
        table.add_column(name, justify="right")
    for name in ("KV equal", "text equal"):
        table.add_column(name)
    for request in result.requests:
        table.add_row(
            request.name,
            str(request.prompt_tokens),
            f"{request.ttft_s * 1e3:.0f}",
            f"{request.bytes / 1e6:.2f}",
            f"{request.gb_per_s:.2f}",
            str(request.runs),
            str(request.blocks),
            _mark(request.kv_equal),
            _mark(request.tokens_equal),
        )
    return table


def _cache_table(result: DemoResult) -> Table:
    table = Table(title="KV caches, MiB")
    for name in ("worker", "layout", "when"):
        table.add_column(name)
    for name in ("reserved", "committed", "registered", "generation"):
        table.add_column(name, justify="right")
    for worker in result.before:
        for when, accounts in (("before", result.before), ("after", result.after)):
            account = accounts[worker]
            table.add_row(
                worker,
                str(account["layout"]),
                when,
                *(
                    f"{int(account[f'{kind}_bytes']) / MIB:.1f}"
                    for kind in ("reserved", "committed", "registered")
                ),
                str(account["generation"]),
            )
    return table


def _growth_picture(before: Numbers, after: Numbers) -> list[str]:
    """decode's committed prefix, before and after, at one scale; what is reserved goes on."""
    old, new = (int(account["committed_bytes"]) for account in (before, after))
    reserved = int(after["reserved_bytes"])
    scale = min(reserved, new * 5 // 4)
    old_width, new_width = max(1, BAR_WIDTH * old // scale), max(1, BAR_WIDTH * new // scale)
    grown = "█" * old_width + "▓" * (new_width - old_width)
    lines = []
    for when, bar, size in (("before", "█" * old_width, old), ("after", grown, new)):
        lines.append(f"decode {when:>6} {bar:░<{BAR_WIDTH}}→ {size / MIB:.1f} MiB committed")
    lines.append(f"[dim]█ committed  ▓ grown  ░→ reserved, up to {reserved / MIB:.0f} MiB[/dim]")
    return lines


def _verdict(result: DemoResult) -> list[str]:
    lines = [
        f"{_mark(result.kv_equal)} prompt KV bit-identical to a single process, block by block",
        f"{_mark(result.tokens_equal)} tokens equal to a single process",
    ]
    growth = result.growth
    if growth is not None:
        start, end = (
            (moment - growth.generation_ns) / 1e6 for moment in (growth.start_ns, growth.end_ns)
        )
        lines.append(
            f"{_mark(result.grew)} decode grew from {growth.old_blocks} to {growth.new_blocks} "
            f"blocks at the same base; the transfer of {growth.transfer_request} began "
            f"{-start:.0f} ms before and ended {end:.0f} ms after; {growth.landed_request} landed "
            "in the new range"
        )
    elif result.why_no_growth:
        lines.append(f"[dim]decode was not made to grow: {result.why_no_growth}[/dim]")
    else:
        lines.append(f"{_mark(False)} decode did not grow while a transfer was under way")
    return lines


def _mark(good: bool) -> str:
    return "[green]yes[/green]" if good else "[red]NO[/red]"
