"""Every command and every snippet in the docs is run, or, where it needs a GPU, a cluster or minutes, parsed."""

import ast
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from megatron_hybrid.cli import COMMANDS as COMMAND_NAMES
from megatron_hybrid.cli import main, parser
from megatron_hybrid.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "patches" / "README.md",
         ROOT / "csrc" / "README.md"]  # fmt: skip
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HEREDOC = re.compile(r"^cat > (\S+) <<(\w+)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:megatron-hybrid|python scripts/|make |pytest)[^`]*)`")
_SCRIPT = re.compile(r"(?:python )?(scripts/\w+\.(?:py|sh))")
PLACEHOLDERS = ("<its flags>", "<flags>")
# one that is run here: it needs neither files nor minutes
RUN = ("doctor", "explain --recipe", "recipes")


def blocks(page: Path, *languages: str):
    return [m[2] for m in _FENCE.finditer(page.read_text()) if m[1] in languages]


def commands() -> list[tuple[str, str]]:
    """(page, command line) of fenced shell blocks, continued lines joined, and of commands in running text."""
    found = []
    for page in PAGES:
        lines = [
            line
            for block in blocks(page, "", "sh", "bash")
            for line in _HEREDOC.sub("", block).replace("\\\n", " ").splitlines()
        ]
        lines += _INLINE.findall(page.read_text())
        found += [(page.name, line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    return list(dict.fromkeys(found))


def words(line: str) -> list[str]:
    for placeholder in PLACEHOLDERS:
        line = line.replace(placeholder, "")
    return shlex.split(line, comments=True)


@lru_cache(maxsize=None)
def help_of(script: str) -> str:
    done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@lru_cache(maxsize=None)
def megatron_flags() -> frozenset[str]:
    """Every flag that scripts/pretrain_gpt.py knows, Megatron's and ours."""
    program = (
        "import argparse\nfrom megatron.training.arguments import add_megatron_arguments\n"
        "from megatron_hybrid.mcore.arguments import add_arguments\n"
        "p = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), on_cpu=True)\n"
        "print(*p._option_string_actions)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.splitlines()[-1].split())


def check_flags(given: list[str], known, where: str) -> None:
    unknown = [word.partition("=")[0] for word in given if word.startswith("--") and word.partition("=")[0] not in known]
    assert not unknown, f"{where}: {unknown} are no flags of it"


def check_torchrun(given: list[str], where: str) -> None:
    """torchrun's own flags, then a script's."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(given)
    script = parsed.training_script
    if parsed.module:
        assert script == "megatron_hybrid.launch"
    elif script.startswith("scripts/"):
        assert (ROOT / script).is_file(), where
    check_flags(parsed.training_script_args, megatron_flags(), where)


def check_make(given: list[str], where: str) -> None:
    targets = [word for word in given if "=" not in word]
    text = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{re.escape(target)}:", text, re.MULTILINE) for target in targets), where
    variables = [word.partition("=")[0] for word in given if "=" in word]
    assert all(re.search(rf"^{name} \?=|\$\({name}\)", text, re.MULTILINE) for name in variables), where


def check(line: str, where: str) -> None:
    program, *given = words(line.split(" | ")[0])
    if program == "megatron-hybrid":
        if len(given) == 1 and given[0] in COMMAND_NAMES:
            return  # its name in running text
        parser().parse_args(given)
    elif program == "torchrun":
        check_torchrun(given, where)
    elif program == "make":
        check_make(given, where)
    elif program == "python" and (match := _SCRIPT.fullmatch(given[0])):
        check_flags(given[1:], help_of(match[1]), where)
    elif program == "pytest":
        assert not given or given[0] in ("-m", "-q", "-x", "-k"), where
    elif program == "pip":
        assert given[0] == "install", where
    else:
        assert program == "source" and given == [".venv/bin/activate"], f"{where}: nobody checks {line!r}"


COMMANDS = commands()


def test_there_are_commands_to_check():
    programs = {line.split()[0] for _, line in COMMANDS}
    assert programs >= {"megatron-hybrid", "torchrun", "make", "python"} and len(COMMANDS) > 20


@pytest.mark.parametrize("page, line", COMMANDS, ids=[f"{page}: {line[:60]}" for page, line in COMMANDS])
def test_command(page, line):
    try:
        check(line, page)
    except SystemExit:  # argparse has said why
        pytest.fail(f"{page}: {line!r} is not accepted")


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if line.startswith("megatron-hybrid")}))
def test_commands_that_need_nothing_are_run(line, monkeypatch, capsys):
    arguments = words(line)[1:]
    if not " ".join(arguments).startswith(RUN) or "R" in arguments:
        pytest.skip("needs files of a run")
    if arguments[0] == "doctor":
        pytest.skip("run by test_cli.py, in a process of its own")
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 0 and capsys.readouterr().out


def test_recipes_in_shell_blocks_load(tmp_path):
    found = [m for page in PAGES for block in blocks(page, "", "sh", "bash") for m in _HEREDOC.finditer(block)]
    assert found
    for match in found:
        path = tmp_path / match[1]
        path.write_text(match[3])
        Recipe.load(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_name_what_there_is(page):
    import megatron_hybrid as mh

    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mh":
                assert hasattr(mh, node.attr), f"{page.name}: mh.{node.attr}"


def test_the_loops_of_the_readme_and_the_migration_guide_run():
    found = [*blocks(ROOT / "README.md", "python"), *blocks(ROOT / "docs" / "migrating.md", "python")]
    assert len(found) >= 2
    for code in found:
        exec(compile(code, "a page", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
    named = [ROOT / name for name in re.findall(r"(?<![\w/])((?:docs|configs|scripts)/[\w/]+\.(?:md|py|yaml|sh))", text)]
    assert [str(path) for path in named if not path.exists()] == []


def flags_of_readme() -> list[str]:
    return re.findall(r"^\| `(--hq-[\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_the_readme_lists_the_flags_that_exist():
    help_text = help_of("scripts/pretrain_gpt.py")
    assert len(flags_of_readme()) > 5
    check_flags(flags_of_readme(), set(re.findall(r"--hq-[\w-]+", help_text)), "README.md")
    megatron = (ROOT / "docs" / "megatron.md").read_text()
    missing = [flag for flag in set(re.findall(r"^  (--hq-[\w-]+)", help_text, re.MULTILINE)) if flag not in megatron]
    assert not missing, f"docs/megatron.md says nothing of {missing}"


def source_messages() -> list[str]:
    """Every string in the source, f-strings with a gap for each value."""
    found = []
    for folder in ("megatron_hybrid", "patches", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_troubleshooting_quotes_messages_that_exist():
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Training goes wrong")[0]
    quoted = [m for row in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE) for m in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 40
    messages = source_messages()
    unknown = []
    for message in quoted:
        pieces = [piece.strip() for piece in message.split("…") if len(piece.strip()) > 2]
        if not pieces or not all(any(piece in said for said in messages) for piece in pieces):
            unknown.append(message)
    assert not unknown


ERRORS_OF_USERS = {
    "UserError", "RecipeError", "PlanError", "ShapeError", "CheckpointError", "ConversionError", "SafetensorsError", "RunError",
    "StatisticsError", "PatchError", "CannotSave",
}  # fmt: skip
COMMANDS_OWN = ("megatron_hybrid/data/", "megatron_hybrid/commands/", "megatron_hybrid/observe/", "scripts/")


def raised_at_users() -> list[tuple[str, list[str]]]:
    """(where, its strings) of every error that a command, a recipe or a run ends with; benchmarks' own left out."""
    found = []
    for folder in ("megatron_hybrid", "patches", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or "/bench_" in where:
                    continue
                name = getattr(node.exc.func, "id", "")
                if name in ERRORS_OF_USERS or (name == "ValueError" and where.startswith(COMMANDS_OWN)):
                    strings = [n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                    found.append((f"{where}:{node.lineno}", strings))
    return found


def test_troubleshooting_has_every_error_of_commands_recipes_and_runs():
    """With its cause and cure; an error that only passes another's words on needs no row."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [m for row in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE) for m in re.findall(r"`([^`]+)`", row)]
    pieces = [[piece.strip() for piece in message.split("…") if len(piece.strip()) > 2] for message in quoted]
    missing = []
    for where, strings in raised_at_users():
        if len("".join(strings)) < 12:
            continue
        if not any(wanted and all(any(w in said for said in strings) for w in wanted) for wanted in pieces):
            missing.append(f"{where}: {' '.join(strings)[:120]}")
    assert not missing, "\n".join(missing)


def test_the_api_reference_builds_without_warnings(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "api_reference.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "warning:" not in done.stderr, done.stderr
    page = (tmp_path / "index.html").read_text()
    import megatron_hybrid as mh

    assert all(f'id="{name}"' in page for name in mh.__all__)
