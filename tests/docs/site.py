"""The website: the pages and the files that they link to, at their places in the repository, so that links work.

mkdocs loads this file as a hook. It shows other files as pages with their text, and folders as lists of files. A link
to `tests/x.py "test_y"` leads to that test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "README.md"
PICTURES = (".png", ".svg")
CODE = re.compile(r"(^ *```.*?^ *```$|<!--.*?-->|`[^`\n]+`)", re.DOTALL | re.MULTILINE)  # where no link is one
LINK = re.compile(r'\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]+)?(?: "(?P<name>[^"]*)")?\)')
INLINE = re.compile(r"(?<!</span>)<code>([^<]*)</code>")
NAME = re.compile(r"(?<!\S)\S{2,36}(?!\S)")  # short enough for a phone: never broken
WHOLE = r'<span class="name">\g<0></span>'
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}  # of others the bare text


def on_files(files: Any, config: Any) -> Any:
    """Replace the files of docs/ by all that can be read."""
    from mkdocs.structure.files import File, InclusionLevel

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    files.append(File.generated(config, "site.css", abs_src_path=str(Path(__file__).with_suffix(".css"))))
    for path, names in sorted(linked().items()):
        place = page_of(path).relative_to(ROOT).as_posix()
        if path.suffix in (".md", *PICTURES):
            files.append(File.generated(config, place, abs_src_path=str(path)))
        else:
            text = "".join(folder_page(path) if path.is_dir() else file_page(path, names))
            files.append(File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Remove comments, and point links to files and folders at the pages that show them."""
    folder = (ROOT / page.file.src_uri).parent
    parts = [part for part in CODE.split(markdown) if not part.startswith("<!--")]
    return "".join(
        part if part.startswith("`") else LINK.sub(lambda link: relinked(link, folder), part) for part in parts
    )


def on_page_content(html: str, **_: Any) -> str:
    """Mark the names in code that a line must not break."""
    return INLINE.sub(lambda code: f"<code>{NAME.sub(WHOLE, code[1])}</code>", html)


def relinked(link: re.Match[str], folder: Path) -> str:
    """Return a link with the place of its page."""
    path = (folder / link["path"]).resolve()
    if not path.exists() or page_of(path) == path:
        return link[0]
    into = page_of(path).relative_to(path.parent).as_posix()
    above = "".join(link["path"].rpartition("/")[:2])
    anchor = f"#{link['name']}" if link["name"] else ""
    return f"]({above}{into}{anchor})"


def page_of(path: Path) -> Path:
    """Return where in the repository the page of a file or folder stands, or would."""
    if path.is_dir():
        return path / ("README.md" if (path / "README.md").exists() else "index.md")
    return path if path.suffix in (".md", *PICTURES) else path.with_name(f"{path.name}.md")


def linked() -> dict[Path, set[str]]:
    """Return all pages and, from them on, every file that is linked to, with the names in it that links ask for."""
    found: dict[Path, set[str]] = {}
    left = [(START, ""), *((page, "") for page in (ROOT / "docs").rglob("*.md"))]
    while left:
        path, name = left.pop()
        path = page_of(path) if page_of(path).exists() else path
        if path not in found:
            found[path] = set()
            left += leaving(path)
        found[path] |= {name} - {""}
    return found


def leaving(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files to which a page, or the list of a folder, leads."""
    if path.is_dir():
        yield from ((file, "") for file in files_of(path))
    elif path.suffix == ".md":
        for link in LINK.finditer("".join(CODE.split(path.read_text())[::2])):
            target = (path.parent / link["path"]).resolve()
            if target.exists():
                yield target, link["name"] or ""


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that have something to read."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size]


def folder_page(folder: Path) -> Iterator[str]:
    """Yield the lines of the page of a folder."""
    yield f"{UNSEARCHED}# {folder.relative_to(ROOT)}\n\n"
    yield from (f"- [`{path.name}`]({path.name})\n" for path in files_of(folder))


def file_page(path: Path, names: set[str]) -> Iterator[str]:
    """Yield the text of a file, with a heading above each definition that a link names."""
    yield f"{UNSEARCHED}# {path.relative_to(ROOT)}\n"
    lines = path.read_text().splitlines()
    starts = {0: ""} | {line: name for name, line in definitions(path) if name in names}
    for start, end in zip(sorted(starts), [*sorted(starts)[1:], None], strict=True):
        yield f"\n## `{starts[start]}`\n" if starts[start] else ""
        yield "\n".join([f"\n````````{LANGUAGES.get(path.suffix, 'text')}", *lines[start:end], "````````\n"])


def definitions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines, with the index of the line where each begins."""
    for node in ast.parse(path.read_text()).body if path.suffix == ".py" else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
