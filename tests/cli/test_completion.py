"""Completion of verbs, groups, options, keys, flags, sweeps and runs."""

from __future__ import annotations

import os
import re
import shlex
import sys

import pytest
from hydra._internal.utils import get_args_parser

from tests.cli.test_compose import as_process, options, write
from titanlab.cli import main
from titanlab.cli.verbs import VERBS
from titanlab.records import OutcomeKind


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("titanlab ", list(VERBS)),
        ("titanlab train precision=", [f"precision={name}" for name in options("precision")]),
        ("titanlab sweep +sweeps=quickstart_", ["+sweeps=quickstart_layouts"]),
        ("titanlab sweep launch=l", ["launch=local"]),
        ("titanlab train +recipe=", [f"+recipe={name}" for name in options("recipe")]),
        ("titanlab train data=files data.f", ["data.files="]),
        ("titanlab train optimizer.schedule.d", ["optimizer.schedule.decay=", "optimizer.schedule.decay_fraction="]),
        ("/some/where/titanlab train parall", ["parallelism.", "parallelism="]),
        ("titanlab tokenize ", []),
        # Two sweeps have a run of that name.
        *(
            (f"titanlab {verb} ", ["again/one-1", "toy-0123abcd", "study/one-1", "two-2"])
            for verb in ("resume", "export")
        ),
        ("titanlab status ", ["again", "other", "study"]),
        ("titanlab retry --all-failed runs/study one", ["one-1", "two-2"]),
        ("titanlab retry study one-1 ", ["two-2"]),
        ("titanlab status study ", ["one-1", "two-2"]),
        ("titanlab status study one-1 ", []),
        ("titanlab collect study ", []),
        ("titanlab status none ", []),
        ("titanlab sync study ", ["again", "other", "again/one-1", "toy-0123abcd", "study/one-1", "two-2"]),
        ("titanlab retry --runs=$ELSEWHERE far ", ["three-3"]),
        ("titanlab export one-1 --into ", []),
        ("titanlab retry study --outcome ", sorted(OutcomeKind)),
        ("titanlab resume one-1 parallelism.sha", ["parallelism.shard="]),
        ("titanlab retry study launch.th", ["launch.threads="]),
        ("titanlab train --from ", ["again/one-1", "toy-0123abcd", "study/one-1", "two-2"]),
        ("titanlab train training.steps=3 --runs $ELSEWHERE --from ", ["three-3"]),
        ("titanlab train --from two-2 parallelism.sha", ["parallelism.shard="]),
        ("titanlab train --from two-2 --", ["--cfg", "--from", "--help", "--runs"]),
        ("titanlab completion ", ["bash"]),
        ("titanlab schedule 'an open quotation mark", []),
    ],
)
def test_completion_of_sweeps_and_runs(here, monkeypatch, shown, line, words):
    folders = (
        "runs/other/toy-0123abcd",
        "runs/study/one-1",
        "runs/study/two-2",
        "elsewhere/far/three-3",
        "runs/again/one-1",
    )
    write(here, {f"{folder}/config.yaml": "name: toy" for folder in folders})
    monkeypatch.setenv("ELSEWHERE", str(here / "elsewhere"))
    monkeypatch.setenv("COMP_LINE", line)
    assert shown("completion", "query").split() == words


@pytest.mark.parametrize("flag", ["--config-dir mine", "--config-dir=mine", "-cd mine", "--config-dir $MINE"])
def test_completion_knows_the_options_of_a_folder_that_is_named(here, monkeypatch, capsys, flag):
    write(here, {"mine/optimizer/patient.yaml": "defaults: [adamw_schema, _self_]\nlr: 0.001\n"})
    monkeypatch.setenv("MINE", str(here / "mine"))
    for verb, others in (("train", "-m --cfg job"), ("sweep", "--dry-run model=debug")):
        monkeypatch.setenv("COMP_LINE", f"titanlab {verb} {flag} {others} optimizer=p")
        assert main(["completion", "query"]) == 0
        assert capsys.readouterr().out.split() == ["optimizer=patient"]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("train", "sweep")])
def test_completion_of_options_has_those_of_the_help(monkeypatch, capsys, verb):
    assert main([verb, "--help"]) == 0
    shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out.partition("options:")[2]))
    monkeypatch.setenv("COMP_LINE", f"titanlab {verb} --")
    assert main(["completion", "query"]) == 0
    words = set(capsys.readouterr().out.split())
    assert "--help" in words or verb == "completion"
    assert words <= shown | {"bash"}


def test_completion_of_flags_names_flags_and_that_of_new_runs(monkeypatch, shown):
    hydras = {name for action in get_args_parser()._actions for name in action.option_strings}
    for verb, own in (("train", {"--from", "--dry-run"}), ("sweep", {"--dry-run", "--force", "--json"})):
        monkeypatch.setenv("COMP_LINE", f"titanlab {verb} --c")
        flags = set(shown("completion", "query").split())
        assert {"--cfg", *own} <= flags
        assert flags <= {*hydras, *own, "--wait", "--prune", "--keep"}
        assert ("--from" in flags) is (verb == "train")


def test_bash_completes(here, tmp_path):
    write(here, {f"runs/study/{name}/config.yaml": "name: toy" for name in ("one-1", "two-2")})
    program = tmp_path / "bin" / "titanlab"
    write(program.parent, {"titanlab": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m titanlab "$@"'})
    program.chmod(0o755)
    script = """
        eval "$(titanlab completion bash)"
        complete_line() {
            COMP_LINE="$1" COMP_POINT=${#1} COMPREPLY=()
            read -ra COMP_WORDS <<< "$1"
            [[ "$1" == *" " ]] && COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            $(complete -p titanlab | sed 's/.*-F \\([^ ]*\\).*/\\1/')
            printf '<%s>' "${COMPREPLY[@]}"; echo
        }
        complete_line "titanlab tok"
        complete_line "titanlab train precision=fp3"
        complete_line "titanlab train training.seq"
        complete_line "titanlab train model=llama_"
        complete_line "titanlab retry study t"
        [[ "$COMP_WORDBREAKS" != *=* ]] && echo whole
    """
    said = as_process("bash", "--norc", "-c", script, PATH=f"{program.parent}:{os.environ['PATH']}")
    assert said.splitlines() == [
        "<tokenize >",
        "<precision=fp32 >",
        "<training.seq_len=>",
        "<model=llama_2m><model=llama_5m>",
        "<two-2 >",
        "whole",
    ]
