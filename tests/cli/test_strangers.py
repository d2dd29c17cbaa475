"""YAMLs from strangers: none has code run, and none reads a secret out of the environment."""

import pickle
from pathlib import Path

import pytest

from titanlab.cli.compose import compose
from titanlab.errors import ConfigError
from titanlab.recipe import read_flags
from titanlab.recipe.strangers import VARIABLES

SECRET = "not-for-others"
HEAD = "defaults: [config, _self_]\n"
# A billion values in ten lines.
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
BOMB += "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
# A YAML beside config.yaml, the key that is named, and a part of the rule.
FILES = {
    "a callback": ("hydra: {callbacks: {x: {_target_: pandas.read_pickle, filepath_or_buffer: <pickle>}}}", "hydra.callbacks.x._target_", "names code"),
    "a callback in parts": ("hydra: {callbacks: {x: {_args_: [<pickle>], _target_: pandas.read_pickle}}}", "hydra.callbacks.x._target_", "names code"),
    "a factory of the log": ("hydra: {job_logging: {version: 1, handlers: {h: {(): subprocess.getoutput, cmd: touch <ran>}}}}", "hydra.job_logging.handlers.h.()", "names code"),
    "a class of the log": ("hydra: {hydra_logging: {version: 1, handlers: {h: {class: logging.config.fileConfig, fname: x}}}}", "hydra.hydra_logging.handlers.h.class", "names code"),
    "an object of the log": ("hydra: {job_logging: {handlers: {h: {class: logging.StreamHandler, stream: 'ext://antigravity'}}}}", "hydra.job_logging.handlers.h.stream", "names code"),
    "a help that runs": ("hydra: {help: {_target_: os.system}}", "hydra.help._target_", "names code"),
    "a key of text": ("name: '${oc.create:{_target_: os.system, command: touch <ran>}}'", "name", "creates configs from text"),
    "decoded text": ("name: '${oc.decode:\"{_target_: os.system, command: touch <ran>}\"}'", "name", "creates configs from text"),
    "a package": ("hydra: {searchpath: ['pkg://antigravity']}", "hydra.searchpath", "would import a module"),
    "a nest": ("name: " + "[" * 20_000, "file", "nested"),
    "a bomb": (BOMB, "file", "aliases"),
    "a variable": ("name: ${oc.env:STRANGE}", "name", "may be a secret"),
    "a variable with a default": ("name: ${oc.env:STRANGE,x}", "name", "may be a secret"),
    "a variable inside of text": ("name: run-${oc.env:STRANGE}", "name", "may be a secret"),
    "a variable by another key": ("sweep: STRANGE\nname: '${oc.env:${sweep}}'", "name", "may be a secret"),
    "a resolver by another key": ("sweep: oc.env\nname: '${${sweep}:STRANGE}'", "name", "may be a secret"),
    "a variable of Hydra's": ("hydra: {job: {name: '${oc.env:STRANGE}'}}\nname: ${hydra:job.name}", "hydra.job.name", "may be a secret"),
}  # fmt: skip
# Overrides that name code, and the key that is named.
OVERRIDES = [
    ("+hydra.callbacks.x._target_=os.system", "hydra.callbacks.x._target_"),
    ("++hydra.callbacks.x={_target_:os.system}", "hydra.callbacks.x._target_"),
    ("+hydra.callbacks={x:{y:[{_target_:os.system}]}}", "hydra.callbacks.x.y._target_"),
    ("+hydra.callbacks.x={_target_:'os.system'},{a:1}", "hydra.callbacks.x._target_"),
    ("+hydra.job_logging.handlers.x.class=logging.config.fileConfig", "hydra.job_logging.handlers.x.class"),
    ("_target_=x", "_target_"),
    ("a=choice([1],{_target_:x})", "a._target_"),
    ("a=tag(t,shuffle({_target_:'x'},1))", "a._target_"),
    ("a=str({_target_:x})", "a._target_"),
    ("+x='ext://os'", "x"),
    ("x=cfg://a", "x"),
    ("hydra.searchpath=[file:///x,pkg://antigravity]", "hydra.searchpath"),
]
# Overrides that name none. A range may have billions of values: none of them is made.
HARMLESS = "seed=1 a.class=x hydra.x.class=logging.StreamHandler +x='ext://sys.stdout' hydra.searchpath=[file:///x] "
HARMLESS += "a=range(1,100000000000) a=interval(0,1) a=glob(*) ~a a=((( a._target_"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for YAMLs, beside a pickle that touches a file."""

    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    monkeypatch.setenv("STRANGE", SECRET)
    (tmp_path / "pickle").write_bytes(pickle.dumps(Payload()))
    (tmp_path / "yamls").mkdir()
    return tmp_path / "yamls"


def written(folder, text, path="strange.yaml"):
    text = text.replace("<pickle>", str(folder.parent / "pickle")).replace("<ran>", str(folder.parent / "ran"))
    (folder / path).parent.mkdir(exist_ok=True, parents=True)
    (folder / path).write_text(text + "\n")
    return ["--config-dir", str(folder), "--config-name", "strange"]


@pytest.mark.parametrize(("text", "key", "rule"), FILES.values(), ids=FILES)
def test_a_yaml_that_names_code_or_a_secret_is_refused(command, folder, text, key, rule):
    said = command(["train", *written(folder, HEAD + text)]).refusal
    assert said["key"] == key
    assert rule in said["rule"]
    assert SECRET not in said[0]
    if "names code" in rule:
        assert said["rule"].endswith(str(folder / "strange.yaml"))
    assert not (folder.parent / "ran").exists()


def test_errors_that_are_linked_in_a_circle_are_read_once(command, folder, monkeypatch):
    # OmegaConf links them so under a debugger too.
    monkeypatch.setenv("OC_CAUSE", "1")
    text, key, rule = FILES["a variable of Hydra's"]
    said = command(["train", *written(folder, HEAD + text)]).refusal
    assert said["key"] == key
    assert rule in said["rule"]


@pytest.mark.parametrize("verb", ["train", "train -m", "train --cfg all", "train --info", "sweep --dry-run"])
def test_no_way_of_composing_runs_code(command, folder, verb):
    flags = written(folder, HEAD + FILES["a callback"][0])
    said = command([*verb.split(), *flags, "seed=1,2" if verb in ("train -m", "sweep --dry-run") else "seed=1"])
    assert said.refusal["key"] == "hydra.callbacks.x._target_"
    assert not (folder.parent / "ran").exists()


def test_an_option_that_is_put_elsewhere_runs_no_code(command, folder):
    written(folder, "x: {_target_: pandas.read_pickle, filepath_or_buffer: <pickle>}", "model/strange.yaml")
    flags = written(folder, "defaults: [config, model@hydra.callbacks: strange, _self_]")
    said = command(["train", *flags]).refusal
    assert said["key"] == "x._target_"
    assert said["rule"].endswith(str(folder / "model" / "strange.yaml"))
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(("override", "key"), OVERRIDES)
def test_an_override_that_names_code_is_refused(override, key):
    with pytest.raises(ConfigError, match="never runs") as raised:
        read_flags(["seed=1", override])
    assert raised.value.key == key


def test_an_override_that_names_none_is_taken():
    assert len(read_flags(HARMLESS.split()).overrides) == len(HARMLESS.split())


def test_what_names_no_code_composes(folder, monkeypatch):
    monkeypatch.setenv("USER", "ada")
    monkeypatch.delenv("SCRATCH", raising=False)
    assert {"USER", "SCRATCH"} < set(VARIABLES)
    assert not [name for name in VARIABLES if any(word in name for word in ("TOKEN", "KEY", "PASS", "SECRET"))]
    text = "name: ${oc.env:USER}\nsweep: ${oc.env:SCRATCH,here}\nhydra: {searchpath: [file://<ran>], job: {name: x}}"
    (folder.parent / "ran").mkdir()
    head = "defaults: [config, {override hydra/job_logging: default}, _self_]\n"
    (recipe,) = compose([*written(folder, head + text), "runs=${hydra:job.name}"])
    assert (recipe.name, recipe.sweep, recipe.runs) == ("ada", "here", "x")
