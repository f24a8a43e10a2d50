"""The page's files: how they are served, and that they fit together and to the router."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.routing import Match

from mooncake_serving.conductor import Why
from mooncake_serving.router import page
from tests.serving.router.support import APART, COUPLED
from tests.waiting import eventually

FOLDER = Path(page.__file__).parent
HTML, SCRIPT, STYLE = (
    (FOLDER / name).read_text() for name in ("index.html", "page.js", "page.css")
)
# By which text could become HTML or code; the policy forbids them, too.
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|setAttribute|import\("
)
REFERENCES = ("for", "aria-labelledby", "aria-describedby")


class Elements(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def of(self, *names: str) -> list[str]:
        return [value for _, name, value in self.attributes if name in names]


ELEMENTS = Elements(HTML)


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")]
)
def test_files_come_with_a_policy_that_allows_only_the_router(cluster, path, kind):
    router, _ = cluster({"both": "both"})
    answer = router.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"text/{kind}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    parts = answer.headers["content-security-policy"].split("; ")
    policy = dict(part.split(" ", 1) for part in parts)
    assert policy.pop("img-src") == "data:"  # the empty icon
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'none'", "'self'"} and policy["default-src"] == "'none'"
    assert router.client.head(path).headers["content-length"] == str(len(answer.content))
    assert router.client.post(path).status_code == 405


def test_the_page_needs_no_key_and_what_it_shows_does(cluster, tmp_path):
    (tmp_path / "keys").write_text("a-key\n")
    router, _ = cluster(COUPLED, api_keys_file=str(tmp_path / "keys"))
    statuses = {path: router.client.get(path).status_code for path in page.PAGE_PATHS}
    assert statuses == {"/": 200, "/page.css": 200, "/page.js": 200}
    assert router.client.get("/page").status_code == 401
    assert {router.client.get(url).status_code for url in urls_of_script().values()} == {401}


def urls_of_script() -> dict[str, str]:
    table = re.search(r"const URLS = \{(.*?)\};", SCRIPT, re.DOTALL)
    assert table is not None and SCRIPT.count("fetch(") == 1
    return dict(re.findall(r'(\w+): "([^"]+)"', table[1]))


def test_every_url_that_the_page_asks_for_is_a_route(cluster):
    router, _ = cluster({"both": "both"})
    urls = urls_of_script()
    used = re.findall(r"\bURLS\.(\w+)", SCRIPT)
    assert set(used) == set(urls)
    for name, url in urls.items():
        method = "POST" if name == "chat" else "GET"
        scope = {"type": "http", "path": "/" + urlsplit(url).path, "method": method}
        assert any(route.matches(scope)[0] is Match.FULL for route in router.app.routes), url
        assert method == "POST" or router.client.get("/" + url).status_code == 200
    loaded = ["/" + url for url in ELEMENTS.of("src", "href") if not url.startswith("data:")]
    assert sorted(loaded) == ["/page.css", "/page.js"]


def test_ids_that_are_used_are_there():
    ids = ELEMENTS.of("id")
    assert len(ids) == len(set(ids))
    used = re.findall(r'byId\("([^"]+)"\)', SCRIPT)
    assert len(used) == SCRIPT.count("byId(") and set(used) <= set(ids)
    assert set(" ".join(ELEMENTS.of(*REFERENCES)).split()) <= set(ids)
    assert set(re.findall(r"#([a-z][\w-]*)[ ,:{>\[]", STYLE)) <= set(ids)


def test_what_others_say_never_becomes_html_or_code():
    assert not SINKS.search(SCRIPT)
    assert not [name for _, name, _ in ELEMENTS.attributes if name == "style" or name[:2] == "on"]
    assert "<style" not in HTML and "<script>" not in HTML
    assert not re.search(r"https?:|//", HTML + re.sub(r"//.*", "", SCRIPT))


def test_refusals_are_those_of_the_conductor():
    table = re.search(r"const REFUSALS = \{(.*?)\};", SCRIPT, re.DOTALL)
    assert table is not None
    words = set(re.findall(r"([A-Z_]+):", table[1]))
    assert words <= set(Why.__members__) and "PREFILL_LOAD" in words


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_its_background(scheme):
    """The ratios of WCAG 2.2, level AA: 4.5 of text, 3 of bars."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): (#\w+)", light if scheme == "light" else dark))
    for name in ("text", "soft", "accent", "good", "bad"):
        for back in ("panel", "back"):
            assert contrast(colors[name], colors[back]) >= 4.5, (name, back)
    assert contrast(colors["on-accent"], colors["accent"]) >= 4.5
    for name in ("placing", "prefill", "handoff", "decode", "whole"):
        assert contrast(colors[name], colors["back"]) >= 3, name


def contrast(one: str, other: str) -> float:
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_decisions_tell_what_the_page_shows(cluster):
    router, _ = cluster(APART, admission={"ttft_s": 60.0})
    router.complete("What is a cache?", max_tokens=5, stream=True)
    eventually(lambda: "seconds" in router.last())
    entry = router.last()
    assert entry["objectives"] == {"ttft_s": 60.0, "tbt_s": None}
    assert 0 <= entry["waited_s"] <= entry["prefilled_s"] <= entry["first_byte_s"]
    assert entry["first_byte_s"] + 3 * entry["tbt_s"] <= entry["seconds"]
    router.complete("What is a cache?", max_tokens=5)
    assert not {"first_byte_s", "tbt_s"} & set(router.last())
