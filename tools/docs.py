"""Links from docstrings to names and from pages to the examples; private parameters are hidden.

MkDocs calls `on_*` (hooks in mkdocs.yml), Griffe `PublicParameters` (extensions there).
"""

import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[1]
_SOURCES = _ROOT / "src" / "jitkern"
_IMPORT = re.compile(r"from (jitkern\S*) import (\w*[A-Z_]\w*) as \2$", re.MULTILINE)
_PLACES = {
    name: f"{module}.{name}"
    for package in _SOURCES.rglob("__init__.py")
    for module, name in _IMPORT.findall(package.read_text())
}
_LANGUAGES = {".py": "python", ".cc": "cpp", ".cu": "cpp", ".sh": "bash", "": "docker"}
_README_LINK = re.compile(r"\]\(examples/([\w.]+)/?\)")
_EXAMPLE = re.compile(r"`examples/([\w.]*)/?`")
_HEADING_OR_NAME = re.compile(r'<h\d id="(jitkern[^"]*)"|<code>(\w+)((?:\.\w+)?)</code>')


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Give README's list of examples a page, and the source of each example a page of its own."""
    text = (_ROOT / "README.md").read_text().partition("\n## Examples\n")[2].partition("\n## ")[0]
    pages = {"index": "# Examples\n" + _README_LINK.sub(r"](\1.md)", text)}
    listed = _README_LINK.findall(text)
    examples = {path.name for path in (_ROOT / "examples").glob("[!._]*")}
    if missing := examples.difference(listed):
        raise PluginError(f"README.md, Examples: no line for {sorted(missing)}")
    for name in listed:
        path = _ROOT / "examples" / name
        sources = sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path]
        blocks = [
            f'````{_LANGUAGES[source.suffix]} title="{source.name}"\n{source.read_text()}````'
            for source in sources
        ]
        pages[name] = "\n\n".join([f"# {name}", *blocks])
    for name, markdown in pages.items():
        files.append(File.generated(config, f"examples/{name}.md", content=markdown))


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Link a mention like `examples/demo.py` to the page of the example."""

    def link(match: re.Match[str]) -> str:
        uri = f"examples/{match[1] or 'index'}.md"
        if files.get_file_from_path(uri) is None:
            return match[0]
        return f"[{match[0]}]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri))})"

    return _EXAMPLE.sub(link, markdown)


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
