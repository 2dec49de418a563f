"""An overview as tables."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from kvxfer.serve.overview import Overview, Worker

MIB = 1 << 20
_STATES = {"ready": "[green]ready[/green]", "draining": "[yellow]draining[/yellow]"}


class StatusScreen:
    def __init__(self, url: str, console: Console | None = None) -> None:
        self._url = url
        self._console = console or Console(highlight=False)

    def show(self, found: Overview, again: bool) -> None:
        """With `again` from the top of the screen, where there is a screen."""
        if again and self._console.is_terminal:
            self._console.clear()
        self._console.print(render(self._url, found))


def render(url: str, found: Overview) -> RenderableType:
    draining = ", draining" if found.is_draining else ""
    title = f"{found.model} at {url}: {found.num_requests} requests under way{draining}"
    parts: list[RenderableType] = [escape(title), _workers(found), _caches(found)]
    if any(worker.lanes for worker in found.workers):
        parts.append(_lanes(found))
    parts += [
        f"[yellow]{escape(worker.id)}: {escape(reason)}[/yellow]"
        for worker in found.workers
        for reason in worker.refused
    ]
    if found.processes:
        parts.append(_processes(found))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        is_number = name.startswith(("#", "%")) or name.endswith(("MiB", "GB/s"))
        table.add_column(name.lstrip("#%"), justify="right" if is_number else "left")
    return table


def _workers(found: Overview) -> Table:
    table = _table(
        "workers", "worker", "role", "state", "device", "#requests", "#queued", "address"
    )
    for one in found.workers:
        state = "asleep" if one.cache.is_sleeping else _STATES.get(one.state, escape(one.state))
        ranks = f" ×{one.tensor_parallel_size}" if one.tensor_parallel_size > 1 else ""
        row = (one.id, one.role, one.device + ranks, one.num_requests, one.num_queued, one.address)
        cells = [escape(str(cell)) for cell in row]
        table.add_row(cells[0], cells[1], state, *cells[2:])
    return table


def _caches(found: Overview) -> Table:
    sizes = ("reserved MiB", "committed MiB", "registered MiB", "budget MiB")
    blocks = ("#blocks", "#free", "#used", "#quarantined", "#cached")
    table = _table("KV caches", "worker", "layout", *sizes, *blocks)
    for one in found.workers:
        if one.cache.blocks_total:
            table.add_row(escape(one.id), escape(one.cache.layout), *_cache_cells(one))
    return table


def _cache_cells(worker: Worker) -> list[str]:
    cache = worker.cache
    sizes = (
        cache.reserved_bytes,
        cache.committed_bytes,
        cache.registered_bytes,
        cache.budget_bytes,
    )
    blocks = (
        cache.blocks_total,
        cache.blocks_free,
        cache.blocks_used,
        cache.blocks_quarantined,
        cache.blocks_cached,
    )
    return [*(f"{size / MIB:.1f}" for size in sizes), *map(str, blocks)]


def _lanes(found: Overview) -> Table:
    table = _table("lanes", "worker", "peer", "lane", "GB/s")
    for worker in found.workers:
        for lane in worker.lanes:
            rate = f"{lane.gbps:.3g}" if lane.gbps > 0 else "not tried"
            table.add_row(escape(worker.id), escape(lane.peer), escape(lane.lane), rate)
    return table


def _processes(found: Overview) -> Table:
    table = _table("processes", "name", "#pid", "state", "#restarts", "last end")
    for one in found.processes:
        row = (one.name, one.pid, one.state, one.num_restarts, one.last_end)
        table.add_row(*(escape(str(cell)) for cell in row))
    return table
