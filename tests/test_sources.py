"""The include closure: over-approximates, names files once, holds no path."""

from __future__ import annotations

from pathlib import Path

import pytest
from headers import put

from jitkern.compilers.sources import include_closure, with_defaults


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "inc/lib/a.h": '#pragma once\n#include "b.h"\n',
        "inc/lib/b.h": "#pragma once\n#define B 1\n",
        "inc/lib/cond.h": "// only where SOMETHING\n",
        "src/ops/x.cu": '#include <lib/a.h>\n#include "x.h"\n#include "../common.h"\n',
        "src/ops/x.h": "#ifdef SOMETHING\n#  include <lib/cond.h>\n#endif\n",
        "src/common.h": "#define C 1\n",
    }
    for name, text in files.items():
        put(tmp_path / name, text)
    return tmp_path


def dirs(tree: Path) -> list[Path]:
    return [tree / "inc", tree / "src"]


def test_digest_sees_every_file_and_no_path(tree: Path, tmp_path_factory) -> None:
    source = '#include "ops/x.cu"\n'
    before = include_closure(source, include_dirs=dirs(tree))
    copy = tmp_path_factory.mktemp("elsewhere") / "deep"
    copy.mkdir()
    for name in ("inc", "src"):
        (tree / name).rename(copy / name)
    assert include_closure(source, include_dirs=dirs(copy)).digest == before.digest
    for path in sorted(copy.rglob("*.*")):
        text = path.read_text()
        path.write_text(text + "// edited\n")
        assert include_closure(source, include_dirs=dirs(copy)).digest != before.digest, path
        path.write_text(text)
    assert include_closure(source + " ", include_dirs=dirs(copy)).digest != before.digest


def test_absolute_source_gets_a_relative_name(tree: Path) -> None:
    closure = include_closure(f'#include "{tree}/src/ops/x.cu"\n', include_dirs=[tree / "inc"])
    assert closure.source == "#include <x.cu>\n"
    assert not any(str(tree) in name + text for name, text in closure.headers.items())
    assert {"x.h", "up/common.h"} <= set(closure.headers)


def test_one_spelling_for_two_files(tmp_path: Path) -> None:
    """Each includes its own neighbour util.h: both are there, and neither takes the other's."""
    for name in ("one", "two"):
        put(tmp_path / name / "k.cu", '#include "util.h"\n')
        put(tmp_path / name / "util.h", f"#define {name.upper()} 1\n")
    unit = f'#include "{tmp_path}/one/k.cu"\n#include "{tmp_path}/two/k.cu"\n'
    closure = include_closure(unit, include_dirs=[])
    assert closure.source == "#include <k.cu>\n#include <2/k.cu>\n"
    assert closure.headers["k.cu"] == "#include <util.h>\n"
    assert closure.headers[closure.headers["2/k.cu"][10:-2]] == "#define TWO 1\n"


@pytest.mark.parametrize(
    "line",
    [
        "#include HEADER",
        "#include CONCAT(a, b)",
        "# include HEADER // <a.h>",
        "#include",
        "#include <a.h",
        '#include "a.h',
        '#include ""',
        "#include \\\n  HEADER",
    ],
)
def test_computed_include_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"source:2: computed include '#"):
        include_closure(f"\n{line}\n")
    assert include_closure(f"\n{line}\n", computed=True).source == f"\n{line}\n"


@pytest.mark.parametrize(
    "text",
    [
        "// #include MACRO\n",
        "/* \n#include MACRO\n */",
        'const char* s = R"x(\n#include MACRO\n)x";',
        'const char* s = "/*";\n#include <nowhere.h>\n// */',
        "int x = 1'000'000;\n#include <nowhere.h>",
        "#define include_me MACRO\n",
    ],
)
def test_what_is_no_include(text: str) -> None:
    closure = include_closure(text)
    assert closure.source == text
    assert not closure.headers


def test_search_order_and_cycles(tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(tmp_path / name / "a.h", f'#include "a.h"\n// {name}\n')
    closure = include_closure("#include <a.h>", include_dirs=[tmp_path / "two", tmp_path / "one"])
    assert closure.headers == {"a.h": "#include <a.h>\n// two\n"}


@pytest.mark.parametrize("given", ["-std=c++20", "--std=c++20", "-std"])
def test_one_standard_in_a_command(given: str) -> None:
    defaults = ["-std=c++17", "-O3"]
    assert with_defaults(defaults, [given]) == ["-O3", given]
    assert with_defaults(defaults, ["-stdlib=libc++"]) == [*defaults, "-stdlib=libc++"]


def test_what_resolves_nowhere_is_told(tmp_path: Path) -> None:
    """In angle brackets: in quotes NVRTC would look for it in the current directory."""
    put(tmp_path / "a.h", '#include "nowhere.h"\n#include <cuda_fp16.h>\n')
    closure = include_closure('#include "a.h"\n#include "mma.h"\n', include_dirs=[tmp_path])
    assert closure.missing == ("mma.h", "nowhere.h", "cuda_fp16.h")
    assert closure.source == "#include <a.h>\n#include <mma.h>\n"
    assert closure.headers["a.h"] == "#include <nowhere.h>\n#include <cuda_fp16.h>\n"


def test_what_asks_for_a_header_names_it_as_who_includes_it(tmp_path: Path) -> None:
    """NVRTC knows headers by their names alone: a neighbour's would not be there."""
    text = """\
// __has_include("comment.h")
#if defined(__has_include) && __has_include( "b.h" ) && !__has_include("absent.h")
#include "b.h"
#endif
"""
    put(tmp_path / "sub/a.h", text)
    put(tmp_path / "sub/b.h", "#define B\n")
    closure = include_closure('#include "sub/a.h"\n', include_dirs=[tmp_path])
    assert closure.headers["sub/a.h"] == text.replace('( "b.h" )', "( <sub/b.h> )").replace(
        '("absent.h")', "(<absent.h>)"
    ).replace('#include "b.h"', "#include <sub/b.h>")
    assert closure.missing == ()
