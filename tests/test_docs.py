"""README.md and docs/ say what is true: their links, paths, commands, snippets, targets and names exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import Ran

from voicehub_aot import adapters
from voicehub_aot.cli import commands, console, settings
from voicehub_aot.proof.quality.utterances import UtteranceSet

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MOST_LINES = 200  # of the README
FOLDERS = ("voicehub_aot", "adapters", "kernels", "artifacts", "tests", "bench", "examples", "docs")
SHELL, PYTHON, TOML, TEXT = "sh", "python", "toml", "text"

Command = Callable[..., Ran]


@dataclass(frozen=True)
class Found:
    """Something a page says, and where."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} {self.text}"


def pages() -> list[Path]:
    return [README, *sorted((ROOT / "docs").glob("*.md"))]


def lines() -> Iterator[tuple[Found, str | None]]:
    """Every line outside and inside fences, with the fence's language: None outside, "" where it has none."""
    for page in pages():
        language: str | None = None
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```"):
                language = line[3:].strip() if language is None else None
            else:
                yield Found(page, number, line), language


def fenced(language: str) -> list[Found]:
    """Whole fenced blocks of a language, at their first line."""
    blocks: list[Found] = []
    last = None
    for found, inside in lines():
        if inside == language:
            here = (found.page, found.line)
            if last == (found.page, found.line - 1):
                blocks[-1] = Found(blocks[-1].page, blocks[-1].line, f"{blocks[-1].text}\n{found.text}")
            else:
                blocks.append(found)
            last = here
    return blocks


def inline() -> list[Found]:
    """What stands between backticks in the text."""
    return [
        Found(found.page, found.line, text)
        for found, inside in lines()
        if inside is None
        for text in re.findall(r"`([^`]+)`", found.text)
    ]


def shell_lines() -> list[Found]:
    """Command lines in fences, without their comments."""
    return [
        Found(found.page, found.line, found.text.partition(" #")[0].strip())
        for found, inside in lines()
        if inside == SHELL
    ]


def commands_named(program: str) -> list[Found]:
    """Command lines of a program, in fences and between backticks."""
    return [found for found in (*shell_lines(), *inline()) if found.text.split()[:1] == [program]]


def wrong(found: list[Found], problem: Callable[[Found], str | None], at_least: int) -> list[str]:
    """What is wrong with each of what was found. There must be enough of it: a check of nothing proves nothing."""
    assert len(found) >= at_least, f"only {len(found)} found"
    problems = [(item, problem(item)) for item in found]
    return [f"{item}: {text}" for item, text in problems if text]


def test_the_readme_is_short() -> None:
    assert 50 < len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_every_fence_has_a_language_that_is_checked() -> None:
    languages = {language for _, language in lines() if language is not None}
    assert languages == {SHELL, PYTHON, TOML, TEXT}
    printed = [found for found, language in lines() if language == TEXT]
    assert [str(found) for found in printed if found.text.startswith(("voicehub-aot ", "python ", "make "))] == []


# --- links and paths


def links() -> list[Found]:
    return [
        Found(found.page, found.line, target)
        for found, inside in lines()
        if inside is None
        for target in re.findall(r"\]\(([^)\s]+)\)", found.text)
        if "://" not in target
    ]


def anchors(page: Path) -> set[str]:
    """Headings as links name them."""
    headings = [f.text for f, inside in lines() if f.page == page and inside is None and f.text.startswith("#")]
    plain = (re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def broken(link: Found) -> str | None:
    target, _, anchor = link.text.partition("#")
    path = (link.page.parent / target).resolve() if target else link.page
    if not path.exists():
        return "no such file"
    return f"no heading {anchor!r}" if anchor and anchor not in anchors(path) else None


def test_every_relative_link_leads_somewhere() -> None:
    assert wrong(links(), broken, at_least=20) == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(README.parent / link.text.partition("#")[0]).resolve() for link in links() if link.page == README}
    assert [str(page) for page in pages() if page != README and page not in linked] == []


def paths() -> list[Found]:
    """Paths that start with a folder of the project, and Python files named without one."""
    pattern = rf"(?<![\w/.<-])(?:(?:{'|'.join(FOLDERS)})/[\w./<>*-]*|[\w-]+\.py\b)"
    return [
        Found(found.page, found.line, text.rstrip(".,:"))
        for found, _ in lines()
        for text in re.findall(pattern, re.sub(r"\]\([^)]*\)", "]", found.text))
    ]


def absent(path: Found) -> str | None:
    """<placeholders> stand for any name; a bare file name for a file anywhere in the project."""
    pattern = re.sub(r"<\w+>", "*", path.text).rstrip("/")
    where = [ROOT] if "/" in pattern else [ROOT / folder for folder in FOLDERS]
    found = any(next(folder.glob(pattern if folder == ROOT else f"**/{pattern}"), None) for folder in where)
    return None if found else "no such path"


def test_every_path_exists() -> None:
    assert wrong(paths(), absent, at_least=60) == []


def names() -> list[Found]:
    """Dotted names of the package."""
    return [
        Found(found.page, found.line, text)
        for found, _ in lines()
        for text in re.findall(r"\bvoicehub_aot(?:\.\w+)+", found.text)
    ]


def unknown(name: Found) -> str | None:
    return None if resolves(name.text) else "no such module or name"


def resolves(name: str) -> bool:
    parts = name.split(".")
    value: Any = None
    for count in range(1, len(parts) + 1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            if not hasattr(value, parts[count - 1]):
                return False
            value = getattr(value, parts[count - 1])
    return True


def test_every_name_of_the_package_exists() -> None:
    assert wrong(names(), unknown, at_least=15) == []


# --- commands


ELSEWHERE = {"--lazy-apps"}  # options of other programs


def unparsed(found: Found) -> str | None:
    """What the command line itself would refuse; nothing is run."""
    words = shlex.split(found.text)[1:]
    group: Any = typer.main.get_command(commands.app)
    if words[0].startswith("-"):
        return None if words in ([flag] for option in group.params for flag in ["--help", *option.opts]) else "unknown"
    if words[0] not in group.commands:
        return f"no subcommand {words[0]!r}"
    if len(words) == 1 and found in inline():  # the command is named, not shown
        return None
    try:
        group.commands[words[0]].make_context(words[0], words[1:]).close()
    except console.CLICK_ERROR as error:
        return error.format_message()  # type: ignore[attr-defined, no-any-return]
    return None


def test_every_command_line_parses() -> None:
    assert wrong(commands_named("voicehub-aot"), unparsed, at_least=40) == []


def test_every_option_named_alone_is_one_of_a_command() -> None:
    group: Any = typer.main.get_command(commands.app)
    options = {name for command in group.commands.values() for option in command.params for name in option.opts}
    known = {"--help", *options, *ELSEWHERE}
    alone = [found for found in inline() if found.text.startswith("--")]
    assert wrong(alone, lambda f: None if f.text.split()[0] in known else "no such option", at_least=20) == []


def test_every_subcommand_is_described() -> None:
    group: Any = typer.main.get_command(commands.app)
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(described) == sorted(group.commands)


def script_text(script: Path) -> str:
    """A script's source and that of the scripts beside it that it imports."""
    seen: list[Path] = []
    waiting = [script]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.append(path)
            imported = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            waiting += [beside for name in imported if (beside := path.with_name(f"{name}.py")).exists()]
    return "".join(path.read_text(encoding="utf-8") for path in seen)


def unknown_option(found: Found) -> str | None:
    """Options of a script appear in its source as they are typed, or as names of a build's options."""
    _, script, *words = shlex.split(found.text)
    if not (ROOT / script).is_file():
        return "no such script"
    text = script_text(ROOT / script)
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    missing = [o for o in options if f'"{o}"' not in text and f'"{o[2:].replace("-", "_")}"' not in text]
    return f"unknown options {missing}" if missing else None


def test_every_script_that_is_run_exists_and_has_its_options() -> None:
    assert wrong(commands_named("python"), unknown_option, at_least=12) == []


def no_target(found: Found) -> str | None:
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    missing = [word for word in found.text.split()[1:] if word not in rules]
    return f"not in the Makefile: {missing}" if missing else None


def test_every_make_target_exists() -> None:
    assert wrong(commands_named("make"), no_target, at_least=8) == []


def no_extra(found: Found) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"voicehub-aot\[([\w,]+)\]", found.text)
    missing = {e for group in extras for e in group.split(",")} - set(project["optional-dependencies"])
    return f"no such extras: {sorted(missing)}" if missing or not extras else None


def test_every_extra_that_is_installed_exists() -> None:
    assert wrong(commands_named("pip"), no_extra, at_least=3) == []


# --- snippets and tables


def bad_snippet(found: Found) -> str | None:
    """A snippet must compile; what it imports, takes from the package and asks of a runtime must exist."""
    try:
        tree = ast.parse(found.text)
        compile(tree, str(found.page), "exec")
    except SyntaxError as error:
        return f"does not compile: {error}"
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                wanted = [alias.name for alias in node.names]
            case ast.ImportFrom():
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Attribute(value=ast.Name(id="voicehub_aot")):
                wanted = [f"voicehub_aot.{node.attr}"]
            case ast.Attribute(value=ast.Name(id="runtime")):
                wanted = [f"voicehub_aot.runtime.runtime.Runtime.{node.attr}"]
            case _:
                wanted = []
        for name in wanted:
            if not resolves(name):
                return f"{name} does not exist"
    return None


def test_every_python_snippet_compiles_and_names_what_exists() -> None:
    assert wrong(fenced(PYTHON), bad_snippet, at_least=4) == []


def bad_settings(found: Found) -> str | None:
    """A TOML block is an options file, or a set of utterances."""
    kind = UtteranceSet if "[[utterance]]" in found.text else settings.BuildSettings
    try:
        kind.model_validate(tomllib.loads(found.text))
    except ValueError as error:
        return str(error)
    return None


def test_every_options_file_and_set_of_utterances_is_accepted() -> None:
    assert wrong(fenced(TOML), bad_settings, at_least=2) == []


def test_the_options_of_every_sampling_loop_are_listed() -> None:
    page = (ROOT / "docs" / "requests.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \|[^|]*\|([^|]*)\|$", page, re.MULTILINE)
    listed = {model: sorted(re.findall(r"`(\w+)`", text)) for model, text in rows if model in adapters.names()}
    assert listed == {name: sorted(adapters.load(name).PROGRAM_OPTIONS) for name in adapters.names()}


def test_every_model_is_in_the_table_of_what_is_verified() -> None:
    _, _, table = README.read_text(encoding="utf-8").partition("## What is verified")
    models = re.findall(r"^\| (\w+) \|", table.partition("\n## ")[0], re.MULTILINE)
    assert sorted({*models} - {"model"}) == adapters.names()


# --- the README's commands, run

TINY = {
    "--buckets 64,128,250": "--weights synthetic --config tiny --buckets 16 --steps 2",
    "--length 96": "--length 16",
}


DEMO_VOICE = "voicehub-aot build f5tts"  # `make demo` and tests/proof/quality/test_demo_voice.py run it


def readme_lines(*subcommands: str) -> list[list[str]]:
    """Arguments of the README's command lines of these subcommands, in its order, but for the demo voice's build."""
    lines = [f.text for f in shell_lines() if f.page == README and f.text.startswith("voicehub-aot ")]
    shown = [shlex.split(line)[1:] for line in lines if not line.startswith(DEMO_VOICE)]
    assert len(shown) == len(lines) - 1
    found = [words for words in shown if words[0] in subcommands]
    assert [words[0] for words in found] == list(subcommands)
    return found


def test_the_readmes_commands_that_need_no_artifact_run(command: Command) -> None:
    for arguments, words in zip(
        readme_lines("--help", "models", "doctor"), ("Ahead-of-time", "supertonic-3", "build with aoti"), strict=True
    ):
        ran = command(*arguments)
        assert (ran.code, ran.err) == (0, "")
        assert words in ran.out


def test_the_readmes_build_and_what_follows_it_run(
    command: Command, supertonic_packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are written, but tiny and synthetic. The engines are in the cache, from `supertonic_packed`."""
    monkeypatch.chdir(tmp_path)
    shown = readme_lines("build", "verify", "inspect", "sample")
    text = "\n".join(shlex.join(words) for words in shown)
    for written, tiny in TINY.items():
        assert text.count(written) == 1
        text = text.replace(written, tiny)
    build, *others = (command(*shlex.split(line)) for line in text.splitlines())
    assert [ran.code for ran in (build, *others)] == [0, 0, 0, 0], [ran.err for ran in (build, *others)]
    assert "engine aoti step: from cache" in build.err
    assert {path.name for path in Path().iterdir()} == {"supertonic.aot", "parity.xml", "latent.safetensors"}
