"""MkDocs hooks: the command reference comes from the command line itself; formulas become MathML, without scripts."""

import re
from html import unescape
from typing import Any

import typer
from latex2mathml.converter import convert
from typer.cli import get_docs_for_click

from treegraft.cli import app

MARK = "<!-- commands -->"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Put every command's help in place of MARK, as `typer utils docs` writes it."""
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def on_page_content(html: str, **_: object) -> str:
    """Turn LaTeX into MathML, which browsers draw themselves."""
    return FORMULA.sub(
        lambda found: convert(unescape(found[2]).strip(), "block" if found[1] == "div" else "inline"), html
    )


def commands() -> str:
    """One section a command."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="treegraft")
    return "\n".join(
        get_docs_for_click(obj=command, ctx=context, indent=1, call_prefix="treegraft")
        for name, command in group.commands.items()
    )
