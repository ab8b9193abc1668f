"""Links names of jitkern in docstrings, such as "As ``h2d_gather``", to their place in the site."""

import re
from pathlib import Path

_IMPORT = re.compile(r"from (jitkern\S*) import (\w*[A-Z_]\w*) as \2$", re.MULTILINE)
_PLACES = {
    name: f"{module}.{name}"
    for package in Path("src/jitkern").rglob("__init__.py")
    for module, name in _IMPORT.findall(package.read_text())
}


def on_page_content(html: str, **_: object) -> str:
    """Link names in the text of docstrings; the heading before them is where they are described."""
    prose, block, docstrings = html.partition('<div class="doc doc-object')
    place = ""

    def link(match: re.Match[str]) -> str:
        nonlocal place
        heading, name, member = match.groups()
        place = heading or place
        if heading or name not in _PLACES or place.startswith(_PLACES[name]):
            return match[0]
        return f'<autoref identifier="{_PLACES[name]}{member}" optional>{match[0]}</autoref>'

    names = r'<h\d id="(jitkern[^"]*)"|<code>(\w+)((?:\.\w+)?)</code>'
    return prose + block + re.sub(names, link, docstrings)
