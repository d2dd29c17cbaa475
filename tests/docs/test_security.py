"""docs/security.md names every module that parses files, and tests that exist."""

import re

import pytest

from tests.docs.pages import ROOT, read

PAGE = "docs/security.md"
PARSING = re.compile(
    r"pickle\.(?:loads?|Unpickler)\b|torch\.load\(|yaml\.(?:safe_load|load|compose|parse)\(|json\.loads?\(|\bparse_json\(|\bparse_yaml\(|safe_open\("
    r"|np\.(?:memmap|fromfile|load)\(|SentencePieceProcessor\(|Tokenizer\.from_\w+\(|\.load_dataset\(|csv\.reader\("
    r"|read_object\(|read_optional\(|read_typed\(|read_regular\(|read_config\(|msgspec\.(?:json\.decode|convert)\("
)
# Modules that parse what this process, or a process that it started, has just written.
OWN = {
    "titanlab/checkpoint/loading.py": "an error on its way between ranks; states of generators, which the page names",
    "titanlab/costs/attention_order.py": "the table of attention kernels, which the package brings",
    "titanlab/checkpoint/saving.py": "values that this process has just written",
    "titanlab/distributed/traffic.py": "what torch's recorder gives in this process",
    "titanlab/distributed/stop.py": "lines of the watcher that has started the rank",
    "titanlab/techniques/profiler/trace.py": "the trace that torch's profiler has just written in this process",
    "titanlab/techniques/tracker/wandb.py": "lines of the writer that the tracker has started, and of the tracker",
    "titanlab/report/wandb_workspace.py": "text of wandb-workspaces, made in the same call",
    "titanlab/doctor/software.py": "one line of the script that this process has started",
    "titanlab/launch/processes.py": "process numbers from the process that forks the ranks",
    "titanlab/launch/rank/rank.py": "the config that the launcher hands over",
}
# Words for which the page is the place: they read or run objects.
EXECUTES = re.compile(
    r"(?<![\w.])(?:eval|exec|__import__)\(|pickle\.(?:loads?|Unpickler)\b|weights_only=False|yaml\.unsafe|allow_pickle=True"
)
ALLOWED = {
    "titanlab/checkpoint/loading.py": "pickle.loads of an error that was just pickled here",
    "titanlab/train/dcp.py": "an unpickler that imports and calls nothing",
    "titanlab/distributed/traffic.py": "an unpickler that imports nothing, of what torch's recorder gives in this process",
}


def modules(pattern):
    sources = sorted((ROOT / "titanlab").rglob("*.py"))
    return {str(path.relative_to(ROOT)) for path in sources if pattern.search(_code(path.read_text()))}


def _code(text):
    """A module without its docstrings and comments."""
    return re.sub(r'"""(?s:.*?)"""|^\s*#[^\n]*$', "", text, flags=re.MULTILINE)


def rows():
    found = [line.strip("| \n").split(" | ") for line in read(PAGE).splitlines() if line.startswith("| ")]
    return found[1:]


def test_every_module_that_parses_files_is_on_the_page():
    named = set(re.findall(r"titanlab/[\w/]+\.py", read(PAGE)))
    missing = modules(PARSING) - named - set(OWN)
    assert not missing, f"{PAGE} does not say what these read: {sorted(missing)}"
    assert set(OWN) <= modules(PARSING)


def test_nothing_runs_what_it_reads():
    assert modules(EXECUTES) == set(ALLOWED)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_every_kind_of_file_is_held_by_tests(row):
    files, _, parsers, tests = row
    assert all((ROOT / path).is_file() for path in re.findall(r"titanlab/[\w/]+\.py", parsers)), files
    held = re.findall(r"tests/[\w/]+\.py", tests)
    assert held, files
    for path in held:
        text = (ROOT / path).read_text()
        assert re.search(r"raises\(|refus|error: |faults|damaged", text), f"{path} expects no refusal"


def test_there_are_rows():
    assert len(rows()) > 12
