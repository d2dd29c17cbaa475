"""Configs of strangers: overrides and contents that name code, packages to import, variables of the environment."""

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError
from titanlab.recipe import own_start_error
from titanlab.recipe.strangers import (
    VARIABLES,
    check_file,
    check_overrides,
    check_search_path,
    check_size,
    replace_resolvers,
)

CODE = "names code, and a config never runs any"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("_target_=x", "_target_", "x"),
        ("+a._target_=x", "a._target_", "x"),
        ("a={b:[{_target_:x}]}", "a.b._target_", "x"),
        ("a=[{_target_:x}],2", "a._target_", "x"),
        ("a=choice([1],{_target_:x})", "a._target_", "x"),
        ("a=shuffle({_target_:x},1)", "a._target_", "x"),
        ("a=tag(t,choice({_target_:'x'},1))", "a._target_", "x"),
        ("a=str({_target_:x})", "a._target_", "x"),
        ("+x='ext://os'", "x", "ext://os"),
        ("x=cfg://a", "x", "cfg://a"),
        ("hydra.x.class=os", "hydra.x.class", "os"),
    ],
)
def test_an_override_that_names_code_is_refused(override, key, value):
    with pytest.raises(ConfigError) as raised:
        check_overrides(["seed=1", override])
    assert (raised.value.key, raised.value.value, raised.value.rule) == (key, value, CODE)


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "a.class=x",
        "hydra.x.class=logging.StreamHandler",
        "+x='ext://sys.stdout'",
        "+x=ext://sys.stderr",
        "hydra.searchpath=[file:///x]",
        # A range may have billions of values: none of them is made.
        "a=range(1,100000000000)",
        "a=interval(0,1)",
        "a=glob(*)",
        "~a",
        # What cannot be read is Hydra's to name.
        "a=(((",
        "a={'_target_':x}",
        "a._target_",
        "",
    ],
)
def test_an_override_that_names_none_is_taken(override):
    check_overrides([override])


@pytest.mark.parametrize("name", ["launcher", "sweeper"])
@pytest.mark.parametrize("form", ["hydra.{}._target_=x", "+hydra.{}._target_=x", "hydra.{}._target_@a=x"])
def test_another_launcher_is_refused_with_titanlabs_own(name, form):
    with pytest.raises(ConfigError, match="would run the points by itself") as raised:
        check_overrides([form.format(name)])
    assert raised.value.cure == "leave it out, and choose with launch=local or launch=slurm"


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ([], None),
        (["file:///x", "/y"], None),
        ("pkg://os", "pkg://os"),
        (["file:///x", "pkg://hydra.conf"], "pkg://hydra.conf"),
        ([3, "pkg://"], "pkg://"),
    ],
)
def test_a_search_path_imports_no_package(entries, refused):
    if refused is None:
        check_search_path(entries)
        return
    with pytest.raises(ConfigError, match="would import a module") as raised:
        check_search_path(entries)
    assert (raised.value.key, raised.value.value) == ("hydra.searchpath", refused)


def test_a_package_with_options_may_be_on_the_search_path(monkeypatch):
    monkeypatch.setattr("titanlab.recipe.strangers.conf_packages", lambda: ["mine.conf"])
    check_search_path(["pkg://mine.conf"])


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"a": {"_target_": "x"}}, "a._target_"),
        ({"a": [{"b": {"()": "x"}}]}, "a.b.()"),
        ([{"_target_": "x"}], "_target_"),
        ({"h": {"class": "logging.config.fileConfig"}}, "h.class"),
        ({"h": {"class": ["logging.StreamHandler"]}}, "h.class"),
        ({"h": {"stream": "ext://antigravity"}}, "h.stream"),
        ({1: {"_target_": None}}, "1._target_"),
    ],
)
def test_a_file_that_names_code_is_named(content, key):
    with pytest.raises(ConfigError) as raised:
        check_file(content, "model", "mine", "there/mine.yaml")
    assert (raised.value.key, raised.value.rule) == (key, f"{CODE}: there/mine.yaml")


@pytest.mark.parametrize("content", [None, "", 3, [], {}, {"a": {"class": "logging.Formatter"}}, {"target": "x"}])
def test_a_file_that_names_none_is_taken(content):
    check_file(content, "model", "mine", "there/mine.yaml")


def test_a_launcher_of_a_file_is_named_by_its_group():
    with pytest.raises(ConfigError) as raised:
        check_file({"_target_": "x"}, "hydra/launcher", "joblib", "file")
    assert str(raised.value) == str(own_start_error("hydra/launcher", "joblib"))


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("a: 1", False),
        ("a: [", False),
        ("", False),
        ("[" * 20_000, True),
        ("a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)), True),
    ],
    ids=["small", "broken", "empty", "deep", "aliases"],
)  # fmt: skip
def test_a_file_that_would_use_up_the_memory_is_refused(tmp_path, text, refused):
    path = tmp_path / "a.yaml"
    if not refused:
        check_size(text, path)
        return
    with pytest.raises(ConfigError) as raised:
        check_size(text, path)
    assert (raised.value.key, raised.value.value, raised.value.cure) == (
        "file",
        path,
        "write the values themselves",
    )


def read(text):
    replace_resolvers()
    return OmegaConf.create({"a": text})["a"]


def cause_of(error):
    while not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def test_only_variables_without_secrets_are_read(monkeypatch):
    monkeypatch.setenv("USER", "ada")
    monkeypatch.delenv("SCRATCH", raising=False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert read("${oc.env:USER}") == "ada"
    assert read("${oc.env:SCRATCH,here}") == "here"
    assert read("${oc.env:SCRATCH}") is None
    for text in ("${oc.env:HF_TOKEN}", "${oc.env:HF_TOKEN,x}", "${oc.env:user}"):
        with pytest.raises(OmegaConfBaseException) as raised:
            read(text)
        assert cause_of(raised.value).key == "oc.env"
        assert "secret" not in str(raised.value).replace("may be a secret", "")
    assert not any("TOKEN" in name or "KEY" in name or "PASS" in name for name in VARIABLES)


@pytest.mark.parametrize("name", ["oc.create", "oc.decode"])
def test_no_config_is_made_of_text(name):
    with pytest.raises(OmegaConfBaseException) as raised:
        read("${" + name + ":'{b: 1}'}")
    assert cause_of(raised.value).key == name
