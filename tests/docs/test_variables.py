"""docs/environment-variables.md names the variables that titanlab sets, and only variables that a run records."""

from __future__ import annotations

import re

from tests.docs.test_names import tables
from titanlab.cli.compose import compose
from titanlab.distributed import ALONE
from titanlab.launch.rank.rank import environment
from titanlab.records.provenance import variables

PAGE = "docs/environment-variables.md"
NAME = re.compile(r"\b[A-Z]+(?:_[A-Z0-9]+)+\b")


def test_the_page_has_what_titanlab_sets(monkeypatch):
    named = {name for head, rows in tables(PAGE) if head[1] == "value" for row in rows for name in NAME.findall(row[0])}
    for name in named:
        monkeypatch.delenv(name, raising=False)
    recipe = compose(["training.deterministic=true"])[0]
    # The places of ranks are those of every launcher, and no subject of the page.
    own = environment(recipe, ALONE).keys() - ALONE.environment().keys()
    assert own == named - {"MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
    assert not [name for name in own if name.startswith(("NCCL_", "TORCH_NCCL_"))]


def test_a_run_records_the_variables_that_the_page_advises():
    advised = {
        name
        for head, rows in tables(PAGE)
        if head[0].startswith("symptom")
        for row in rows
        for name in NAME.findall(row[1])
    }
    assert len(advised) > 12
    assert variables(dict.fromkeys(advised, "1")).keys() == advised
