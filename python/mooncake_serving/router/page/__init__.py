"""The router's page: a chat, the engines and the last decisions, for people with a browser.

Three static files. The page is allowed nothing but to load them and to ask the router; what it
shows of models and requests is text, never HTML.
"""

from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PAGE_PATHS = tuple(FILES)  # which need no key: the page asks for one
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Make the routes of the page, of whose files each is read once."""
    folder = Path(__file__).parent
    return [
        Route(path, Response((folder / name).read_bytes(), 200, HEADERS, kind), methods=["GET"])
        for path, (name, kind) in FILES.items()
    ]
