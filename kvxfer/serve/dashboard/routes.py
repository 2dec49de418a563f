"""Where the live page is: /ui, its files, its events. Nothing of it comes from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvxfer.serve.dashboard.events import Watch
from kvxfer.serve.dashboard.picture import Watched

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def dashboard_routes(router: Watched, watch: Watch | None = None) -> list[BaseRoute]:
    """The page of `router`, which the application's own loop drives; `watch` to be able to end its
    streams, else they end with the server."""
    watch = watch or Watch(router)
    here = Path(__file__).parent
    files = {one.name: one for one in sorted(here.iterdir()) if one.suffix in KINDS}
    names = {"/ui": "page.html", **{f"/ui/{name}": name for name in files}}
    pages = [_static(path, files[name]) for path, name in names.items()]
    return [*pages, Route("/ui/events", watch.endpoint, methods=["GET"])]


def _static(path: str, file: Path) -> Route:
    content, kind = file.read_bytes(), KINDS[file.suffix]

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return Route(path, endpoint, methods=["GET"])
