#!/usr/bin/env python3
"""The API reference: one HTML page of everything that `import megatron_hybrid as mh` offers, from its docstrings.

    python scripts/api_reference.py --out build/api

Prints a warning for a public name, method or module without a docstring, and for a `name` in one that looks like this
package's and is not there; exits 1 when there was one. Needs neither a GPU nor Megatron.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import html
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_hybrid"
_CODE = re.compile(r"``(.+?)``|`([^`]+)`", re.DOTALL)
_ANNOTATION = re.compile(r"(: |-> )'([^']*)'")  # a string, since annotations are postponed
_OURS = re.compile(r"(?:mh|megatron_hybrid)\.(\w+)")
_TORCH_METHODS = {"extra_repr": "As of `torch.nn.Module`.", "zero_grad": "As of `torch.optim.Optimizer`."}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 980px; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.4rem; border-bottom: 1px solid #ddd; } h3 { margin-bottom: 0.2rem; font-size: 1rem; }
.sig { font-family: ui-monospace, monospace; font-size: 0.86rem; background: #f6f6f4; padding: 0.4rem 0.7rem; }
.doc { white-space: pre-wrap; } .where { color: #777; font-size: 0.85rem; }
code { background: #f2f2ef; padding: 0 0.2rem; }
ul.index { columns: 3; list-style: none; padding: 0; }
"""


class Reference:
    """Collects the page and its warnings."""

    def __init__(self, package):
        self.package, self.parts, self.warnings = package, [], []

    def page(self) -> str:
        names = sorted(self.package.__all__, key=str.lower)
        index = "".join(f'<li><a href="#{name}">{name}</a></li>' for name in names)
        for name in names:
            self.add(name, getattr(self.package, name))
        modules = "".join(self.module(path) for path in sorted(PACKAGE.rglob("*.py")))
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>megatron_hybrid</title>'
            f"<style>{_STYLE}</style></head><body><h1>megatron_hybrid {self.package.__version__}</h1>"
            f'<p><code>import megatron_hybrid as mh</code></p><ul class="index">{index}</ul>{"".join(self.parts)}'
            f"<h2>Modules</h2><table>{modules}</table></body></html>\n"
        )

    def add(self, name: str, thing) -> None:
        """A section for an exported name; a class with its public methods and properties."""
        where = f"{thing.__module__}" if hasattr(thing, "__module__") else ""
        self.parts.append(f'<h2 id="{name}">mh.{name}</h2><p class="where">{html.escape(where)}</p>')
        self.entry(f"mh.{name}", thing, name)
        if inspect.isclass(thing):
            for attribute, member in members(thing):
                self.parts.append(f"<h3>{name}.{attribute}</h3>")
                self.entry(f"mh.{name}.{attribute}", member, attribute)

    def entry(self, full: str, thing, short: str) -> None:
        target = getattr(thing, "__func__", thing)
        doc = own_doc(target) or _TORCH_METHODS.get(short)
        if not doc:
            self.warnings.append(f"{full} has no docstring")
        if not isinstance(thing, property):
            self.parts.append(f'<p class="sig">{html.escape(short + signature(target))}</p>')
        self.parts.append(f'<div class="doc">{self.text(full, doc or "")}</div>')

    def text(self, full: str, doc: str) -> str:
        for match in _CODE.finditer(doc):
            for ours in _OURS.findall(match[1] or match[2]):
                known = hasattr(self.package, ours) or (PACKAGE / ours).exists() or (PACKAGE / f"{ours}.py").exists()
                if not known:
                    self.warnings.append(f"{full} mentions {match[0]}, which is not there")
        return _CODE.sub(lambda match: f"<code>{match[1] or match[2]}</code>", html.escape(doc, quote=False))

    def module(self, path: Path) -> str:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        doc = ast.get_docstring(ast.parse(path.read_text()))
        if not doc:
            self.warnings.append(f"module {name} has no docstring")
        first = (doc or "").strip().split("\n\n")[0]
        return f"<tr><td><code>{name}</code></td><td>{self.text(name, first)}</td></tr>"


def own_doc(thing) -> str | None:
    """The docstring that was written for it; a dataclass's made-up one does not count."""
    doc = inspect.cleandoc(thing.__doc__) if thing.__doc__ else None
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing) and doc and doc.startswith(f"{thing.__name__}("):
        return None
    return doc


def signature(thing) -> str:
    try:
        return _ANNOTATION.sub(r"\1\2", str(inspect.signature(thing)))
    except (TypeError, ValueError):
        return ""


def members(cls):
    """(name, member) of the public methods and properties that this package defines on a class, in order."""
    seen = {}
    for owner in reversed(cls.__mro__):
        if owner.__module__.startswith("megatron_hybrid"):
            seen |= {name: member for name, member in vars(owner).items() if not name.startswith("_")}
    for name, member in seen.items():
        if isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member):
            yield name, member


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "api", help="folder of index.html")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    import megatron_hybrid

    reference = Reference(megatron_hybrid)
    text = reference.page()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "index.html").write_text(text, encoding="utf-8")
    for warning in reference.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(args.out / "index.html")
    return 1 if reference.warnings else 0


if __name__ == "__main__":
    raise SystemExit(main())
