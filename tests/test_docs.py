"""What README, CONTRIBUTING and the site say can be typed, run and built."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer
from tiny import make_pair

from treegraft.cli import app
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.scheduler import Artifact, Rule, Rules

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL, PYTHON = ("console", "bash", "sh", "shell"), ("python", "py")
UNCHECKED = ("source", "cd", "export", "pip", "git", "echo", "cc", "gcc", "sed")  # programs that are not ours
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """A page's code blocks, but for those with `<!-- not run: why -->` on the line before."""
    fence = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
    text = page.read_text()
    for found in fence.finditer(text):
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2].strip()
        if not re.fullmatch(r"<!-- not run: .+ -->", before):
            line = text[: found.start("text")].count("\n") + 1
            yield Block(page, line, found["language"], dedent(found["text"]))


BLOCKS = [block for page in PAGES for block in blocks(page)]


def lines(block: Block) -> list[str]:
    """The commands of a shell block; where some have a `$ ` prompt, the others are output."""
    joined = block.text.replace("\\\n", " ").splitlines()
    typed = [line[2:] for line in joined if line.startswith("$ ")] or joined
    return [line for line in typed if line.strip() and not line.strip().startswith("#")]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in SHELL], ids=str)
def test_every_command_in_a_shell_block_can_be_typed(block: Block) -> None:
    for line in lines(block):
        words = shlex.split(line, comments=True)
        while re.match(r"\w+=", words[0]):
            words = words[1:]
        for end in ("|", ">", "&&"):
            words = words[: words.index(end)] if end in words else words
        program, *rest = words
        if program == "treegraft":
            COMMANDS[rest[0]].make_context(rest[0], rest[1:])  # raises where options or arguments do not fit
        elif program == "make":
            assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in rest), line
        elif program == "python":
            assert (ROOT / rest[0]).exists(), line
        else:
            assert program in UNCHECKED, f"{block}: {program!r} is no command that this test knows"


def test_a_wrong_option_in_a_shell_block_is_found() -> None:
    wrong = Block(ROOT / "README.md", 1, "console", "treegraft generate --prompt x \\\n  --shedule small\n")
    with pytest.raises(Exception, match="shedule"):
        test_every_command_in_a_shell_block_can_be_typed(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_named_in_the_text_exist(page: Path) -> None:
    for code in re.findall(r"`treegraft ([^`]+)`", page.read_text()):
        name, *words = code.split()
        assert name in COMMANDS, f"{page.name}: treegraft {name}"
        known = {option for each in COMMANDS[name].params for option in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, f"{page.name}: treegraft {code}"
    for block in blocks(page):
        if block.language not in SHELL:
            assert not re.search(r"^(\$ )?treegraft ", block.text, re.M), f"{block}: mark it as console"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with the files that Python blocks name, and tiny models in place of the models that they name."""
    folder = tmp_path_factory.mktemp("docs")
    target, medium = make_pair(folder, "llama")
    target.tokenizer.chat_template = "{% for message in messages %}t1 {{ message.content }} t2 {% endfor %}"
    target.tokenizer.save_pretrained(target.name)
    rules = Rules((Rule(1, (("root_match", "<=", 1.0),)), Rule(3, (("lag", "<=", 4.0),))), ("root_match", "lag"))
    models = {"target": target.fingerprint, "medium": medium.fingerprint}
    artifact = Artifact(rules, Drafting().as_dict(), {"kind": "score", "log_s": -2.5}, 0, models)
    (folder / "scheduler.json").write_text(artifact.to_json())
    instead = {"default": target.name, "default-medium": medium.name, "cuda": "cpu"}
    instead |= {"Qwen/Qwen3-8B": target.name, "Qwen/Qwen3-0.6B": medium.name}
    return folder, {f'"{name}"': repr(tiny) for name, tiny in instead.items()}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.language in PYTHON for b in blocks(page))], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, workplace: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, models = workplace
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language in PYTHON:
            code = block.text
            for name, tiny in models.items():
                code = code.replace(name, tiny)
            exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), names)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_and_asks_for_nothing_from_outside(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 2
    for page in pages:
        html = page.read_text()
        fetched = re.findall(r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)', html)
        fetched += re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(https?:[^"]+)', html)
        fetched += re.findall(r'<link[^>]+href="(https?:[^"]+)"[^>]+rel="(?:stylesheet|preconnect)"', html)
        assert not fetched, page
        assert "arithmatex" not in html, f"{page}: a formula was not turned into MathML"


def test_the_command_reference_has_every_command_and_option(site: Path) -> None:
    shown = unescape((site / "commands" / "index.html").read_text())
    for name, command in COMMANDS.items():
        assert f'id="treegraft-{name}"' in shown
        section = shown.split(f'id="treegraft-{name}"')[1].split("<h2")[0]
        for parameter in command.params:
            assert all(option in section for option in parameter.opts if option.startswith("--")), (name, parameter)


def test_the_drawn_concepts_are_what_their_script_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw_concepts", ROOT / "tools" / "draw_concepts.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for draw in (script.graft, script.fork, script.value):
        path = ROOT / "docs" / "pictures" / f"{draw.__name__}.svg"
        assert path.read_text() == draw(), f"{path.name} is old: run tools/draw_concepts.py"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
