"""Documents say what is there: links lead somewhere, commands exist, exit codes and rooms are the real ones."""

from __future__ import annotations

import re

import pytest

from kvstore.daemon.config import Config, describe, print_config
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.main import COMMANDS, EPILOG

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAKE = re.compile(r"(?:^|[`\s(])make ([a-z][a-z-]*)")
KVCTL = re.compile(r"`kvctl ([a-z]+)|^\s+(?:\.venv/bin/)?kvctl ([a-z]+)", re.MULTILINE)
FILE = re.compile(r"`([\w./-]*\w\.(?:py|cpp|h|proto|md|toml|sh|yml|yaml))`")
NOT_OURS = {"config.toml", "kvstored.toml"}
"""Files that a user writes."""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def documents(root, files):
    return {name: (root / name).read_text() for name in files(".md")}


def slugs(text: str) -> set[str]:
    """Anchors of the headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(name: str, text: str, root) -> list[str]:
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = ((root / name).parent / path) if path else root / name
        if not file.exists() or (anchor and anchor not in slugs(file.read_text())):
            found.append(f"{name}: {target}")
    return found


def lost_files(name: str, text: str, known: list[str]) -> list[str]:
    """Files named between backticks that no path of the project ends in."""
    lost = []
    for word in sorted(set(FILE.findall(FENCE.sub("", text)))):
        if word not in known and not any(path.endswith(f"/{word}") for path in known):
            lost.append(f"{name}: {word}")
    return lost


def targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def test_links_lead_somewhere(documents, root):
    assert [link for name, text in documents.items() for link in broken_links(name, text, root)] == []


def test_files_between_backticks_exist(documents, files):
    known = files("")
    lost = [word for name, text in documents.items() for word in lost_files(name, text, known)]
    assert [word for word in lost if word.rpartition(" ")[2] not in NOT_OURS] == []


def test_make_commands_exist(documents, root):
    known = targets((root / "Makefile").read_text())
    used = {(name, word) for name, text in documents.items() for word in code_words(text, MAKE)}
    assert {(name, word) for name, word in used if word not in known} == set()
    assert {"demo", "test"} <= {word for name, word in used if name == "README.md"}


def code_words(text: str, pattern: re.Pattern[str]) -> set[str]:
    """Words that a pattern finds in code: indented lines, fences, and between backticks."""
    code = "\n".join(
        [*re.findall(r"^ {4}\S.*$", text, re.MULTILINE), *FENCE.findall(text), *re.findall(r"`[^`\n]+`", text)]
    )
    return {next(filter(None, found), "") if isinstance(found, tuple) else found for found in pattern.findall(code)}


def test_kvctl_commands_in_documents_exist(documents):
    known = {name for panel in COMMANDS.values() for name in panel}
    used = {(name, word) for name, text in documents.items() for word in code_words(text, KVCTL)}
    assert {(name, word) for name, word in used if word not in known} == set()


def test_every_exit_code_is_documented_and_no_other(documents):
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", documents["docs/operations.md"], re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(code.value, code.name) for code in Exit}
    assert set(map(int, re.findall(r"\b(\d+) ", EPILOG))) == {code.value for code in Exit} - {Exit.INTERRUPTED}


def test_every_configuration_key_is_documented_with_the_text_of_help(documents):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", documents["docs/operations.md"], re.MULTILINE)
    told = {name: (default, meaning) for name, default, meaning in rows if name in Config.model_fields}
    assert {name: meaning for name, (_, meaning) in told.items()} == {
        name: describe(name) for name in Config.model_fields
    }
    shown = dict(re.findall(r"^(\w+) = (.*)$", print_config(Config()), re.MULTILINE))
    defaults = {name: default.strip("`") for name, (default, _) in told.items() if default.startswith("`")}
    del defaults["socket"]
    assert defaults == {name: shown[name] for name in defaults}
    unset = [name for name in told if name not in defaults and name != "socket"]
    assert [name for name in unset if getattr(Config(), name) is not None] == []


def test_every_command_is_documented(documents):
    text = documents["docs/operations.md"]
    assert [n for panel in COMMANDS.values() for n in panel if f"`kvctl {n}" not in text] == []


def test_every_room_is_on_the_map(documents, product):
    rooms = {item.path.rsplit("/", 1)[0] for item in product if item.is_package and item.path.count("/") <= 2}
    rooms = {room for room in rooms if room.startswith("kvstore/") or "/" not in room} - {"kvstore"}
    assert [room for room in sorted(rooms) if f"`{room}/`" not in documents["docs/architecture.md"]] == []


def test_rules_find_breaches(tmp_path):
    (tmp_path / "a.md").write_text("# One Thing\n")
    text = "[x](a.md) [y](a.md#one-thing) [z](b.md) [w](a.md#two) [v](#here)\n# Here\n"
    (tmp_path / "c.md").write_text(text)
    assert broken_links("c.md", text, tmp_path) == ["c.md: b.md", "c.md: a.md#two"]
    assert code_words("run `make test` or\n\n    make bench\n\nmake sure", MAKE) == {"test", "bench"}
    assert code_words("`kvctl why TOKENS` and kvctl says", KVCTL) == {"why"}
    assert lost_files("a.md", "`b/c.py` `c.py` `d/c.py` `x.py` `c.pyx`", ["a/b/c.py"]) == ["a.md: d/c.py", "a.md: x.py"]
    assert targets("demo: x\n.PHONY: y\ntest-slow:\n") == {"demo", "test-slow"}
