"""Two changes to what mkdocstrings shows: names in docstrings are links, private parameters hidden.

MkDocs calls `on_page_content` (hooks in mkdocs.yml), Griffe `PublicParameters` (extensions there).
"""

import re
from pathlib import Path

import griffe

_SOURCES = Path(__file__).resolve().parents[1] / "src" / "jitkern"
_IMPORT = re.compile(r"from (jitkern\S*) import (\w*[A-Z_]\w*) as \2$", re.MULTILINE)
_PLACES = {
    name: f"{module}.{name}"
    for package in _SOURCES.rglob("__init__.py")
    for module, name in _IMPORT.findall(package.read_text())
}
_HEADING_OR_NAME = re.compile(r'<h\d id="(jitkern[^"]*)"|<code>(\w+)((?:\.\w+)?)</code>')


def on_page_content(html: str, **_: object) -> str:
    """Link a name like "As ``h2d_gather``", except below the heading of that name."""
    prose, block, docstrings = html.partition('<div class="doc doc-object')
    place = ""

    def link(match: re.Match[str]) -> str:
        nonlocal place
        heading, name, member = match.groups()
        place = heading or place
        if heading or name not in _PLACES or place.startswith(_PLACES[name]):
            return match[0]
        return f'<autoref identifier="{_PLACES[name]}{member}" optional>{match[0]}</autoref>'

    return prose + block + _HEADING_OR_NAME.sub(link, docstrings)


class PublicParameters(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        public = (p for p in func.parameters if p.name[0] != "_")
        func.parameters = griffe.Parameters(*public)
