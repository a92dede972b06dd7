"""How the site is made of the docstrings: which names a page lists, roles, links to the source.

mkdocs calls ``on_config`` and ``on_page_markdown``, griffe ``Docstrings``.
``python docs/api_pages.py SITE`` checks what was built.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/vescale/vescale/blob/main/"
_LISTING = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)
_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj):`~?([^`]+)`")


def _init_of(module: str) -> ast.Module:
    package, *inner = module.split(".")
    (folder,) = ROOT.glob(f"packages/*/src/{package}")
    return ast.parse(folder.joinpath(*inner, "__init__.py").read_text(encoding="utf-8"))


def _names_of_torch(module: str) -> set[str]:
    return {
        alias.name
        for node in _init_of(module).body
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed.tensor"
        for alias in node.names
    }


@cache
def public_names(module: str) -> tuple[str, ...]:
    """Return what ``__all__`` of a package or a module of one lists, without importing it."""
    for node in _init_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


def on_config(config: Any) -> None:
    """Show the version beside the name."""
    text = (ROOT / "packages/vescale/src/vescale/__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    assert version is not None
    config["site_name"] += f" {version[1]}"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in the place of a comment what it names: public names, or a file with code.

    ``<!-- api: module -->`` becomes the entries of every public name, ``<!-- include: file -->`` a
    code block. A comment, since what formats the code on pages leaves it alone.
    """

    def entry(module: str, name: str) -> str:
        if name in _names_of_torch(module):
            return f"## {name} {{#{module}.{name}}}\n\n`torch.distributed.tensor.{name}` itself."
        return f"::: {module}.{name}"

    def listing(match: re.Match[str]) -> str:
        return "\n\n".join(entry(match[1], name) for name in public_names(match[1]))

    def program(match: re.Match[str]) -> str:
        code = (ROOT / match[1]).read_text(encoding="utf-8")
        return f'```python title="{Path(match[1]).name}"\n{code}```'

    return _INCLUDE.sub(program, _LISTING.sub(listing, markdown))


try:
    import griffe
except ImportError:  # the tests import this file without what builds the site
    pass
else:

    class Docstrings(griffe.Extension):
        """Show roles as code, linked where the name is public, and link to the source."""

        def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
            if obj.docstring is None:
                return
            package = obj.path.split(".")[0]
            names = public_names(package)

            def code(match: re.Match[str]) -> str:
                name = match[1].rsplit(".")[-1]
                linked = f"[`{name}`][{package}.{name}]"
                return linked if name in names else f"`{match[1]}`"

            obj.docstring.value = _ROLE.sub(code, obj.docstring.value)
            if obj.name in names and (obj.is_class or obj.is_function) and obj.lineno:
                file = Path(str(obj.filepath)).relative_to(ROOT).as_posix()
                obj.docstring.value += f"\n\n[Source]({SOURCE}{file}#L{obj.lineno})"


def problems(site: Path) -> list[str]:
    """Return what is wrong with a built site: names without an entry, roles in the text."""
    found: list[str] = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        plain = re.sub(r"<(code|pre)\b.*?</\1>", "", text, flags=re.DOTALL)
        found += [
            f"{page}: {role[0]}" for role in re.finditer(r":(func|class|meth|mod|attr):", plain)
        ]
    for source in sorted((ROOT / "docs" / "api").glob("*.md")):
        built = site / "api" / source.stem / "index.html"
        ids = set(re.findall(r'id="([\w.]+)"', built.read_text(encoding="utf-8")))
        for module in _LISTING.findall(source.read_text(encoding="utf-8")):
            missing = {f"{module}.{name}" for name in public_names(module)} - ids
            found += [f"{built}: no entry for {name}" for name in sorted(missing)]
    return found


if __name__ == "__main__":
    told = problems(Path(sys.argv[1]))
    sys.exit("\n".join(told) if told else 0)
