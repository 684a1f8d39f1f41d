"""A dashboard in this process, asked without a socket; and its pages read as a browser would."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx

from composer_mesh.plugins.dashboard.access import Sessions
from composer_mesh.plugins.dashboard.app import Dashboard, DashboardOptions, make_app
from composer_mesh.services.web.http_server import Access

BASE = "http://127.0.0.1:8200"
OWN_TAGS = {
    *("html", "head", "meta", "title", "link", "script", "style", "noscript", "body", "header"),
    *("nav", "main", "section", "article", "div", "span", "a", "p", "br", "wbr", "b", "small"),
    *("h1", "h2", "h3", "dl", "dt", "dd", "ul", "ol", "li", "pre", "code", "kbd", "time", "dialog"),
    *("form", "label", "input", "select", "option", "fieldset", "legend", "button", "progress"),
    *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "g", "line"),
    *("text", "path", "rect", "circle", "polyline", "polygon"),
}


def dashboard(
    folder: Path, token: str = "", user: int | None = None, **options: Any
) -> tuple[Dashboard, Any]:
    """The dashboard of a folder and its application, with the checks of a served one."""
    chosen = DashboardOptions(folder=folder, **options)
    made = Dashboard.of(chosen, Sessions(token))
    made.catalog.read_all()
    who = os.geteuid() if user is None else user
    return made, Access(make_app(made, lambda _: who), chosen.names, "")


def client(app: Any, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers)


class Page(HTMLParser):
    """The elements, the attributes and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(html)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def check_harmless(self) -> None:
        """Fail for an element, a handler, a style or an address that is not the page's own."""
        for tag, attributes in self.elements:
            assert tag in OWN_TAGS, tag
            for key, value in attributes.items():
                assert not key.startswith("on"), (tag, key)
                assert key != "style", tag
                if key in ("href", "src", "action", "xlink:href"):
                    assert value.startswith(("/", "?", "#")), (tag, key, value)
                    assert not value.startswith("//"), (tag, key, value)
        scripts = [about for tag, about in self.elements if tag == "script"]
        assert scripts == [{"src": "/static/app.js", "defer": ""}]
        metas = [about.get("http-equiv") for tag, about in self.elements if tag == "meta"]
        assert not set(metas) - {None}
