"""What a process keeps for its next composition never shows: each is what Hydra composes in a new process."""

import copy
import importlib
import os
from types import SimpleNamespace

import hydra
import pytest
from hydra import compose, initialize_config_dir
from hydra._internal import config_loader_impl
from omegaconf import Container, OmegaConf

from titanlab.errors import ConfigError
from titanlab.recipe import Loader, read_flags
from titanlab.recipe import hydra_internal as hydra_loader
from titanlab.recipe import hydra_internal as hydra_sources
from titanlab.recipe.hydra_internal import replace_sources


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The merged configs of this test alone, by defaults list and contents."""
    monkeypatch.setattr(hydra_loader, "_compositions", {})
    monkeypatch.setattr(hydra_loader.Repository, "_read", {})
    return hydra_loader._compositions


@pytest.fixture
def merges(monkeypatch):
    """How many defaults lists Hydra has merged."""
    merged = []
    hydras = hydra_loader._hydras_compose
    monkeypatch.setattr(
        hydra_loader, "_hydras_compose", lambda *given, **named: merged.append(named) or hydras(*given, **named)
    )
    return merged


def whole(*arguments):
    flags = read_flags(arguments)
    return Loader(flags, flags.overrides).compose(()).whole


def nodes(config, path=""):
    """Each node of a config: its path, class, value, and what OmegaConf knows of it."""
    about = config._metadata
    facts = (about.ref_type, about.object_type, about.optional, about.key, dict(about.flags or {}))
    if not isinstance(config, Container) or not isinstance(config._content, dict | list):
        return [(path, type(config), config._value(), *facts)]
    keys = range(len(config._content)) if isinstance(config._content, list) else config._content
    inner = [nodes(config._content[key], f"{path}.{key}") for key in keys]
    assert all(config._content[key]._parent is config for key in keys)
    return [(path, type(config), *facts), *(node for each in inner for node in each)]


def of_hydra(monkeypatch, *arguments):
    """A composition in which nothing is kept: Hydra's own functions."""
    with monkeypatch.context() as patch:
        patch.setattr(hydra_loader, "replace", lambda: None)
        patch.setattr(config_loader_impl, "CachingConfigRepository", hydra_loader.CachingConfigRepository)
        loader = config_loader_impl.ConfigLoaderImpl
        patch.setattr(loader, "_load_single_config", hydra_loader._hydras_load_single)
        patch.setattr(loader, "_compose_config_from_defaults_list", hydra_loader._hydras_compose)
        patch.setattr(hydra_loader.defaults_list, "_create_interpolation_map", hydra_loader._hydras_choices)
        return whole(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["+recipe=quickstart", "training.steps=7"],
        ["+recipe=llama3_8b_64gpus", "parallelism=fsdp_tp", "precision=bf16"],
        ["model=mixtral_debug", "optimizer=muon", "tracker=[tensorboard,jsonl]", "ac=full"],
        ["launch=slurm", "cluster=cpu", "hydra.job.name=mine", "+tags=[a,b]"],
    ],
    ids=" ".join,
)
def test_every_composition_is_what_hydra_composes(monkeypatch, kept, merges, arguments):
    expected = nodes(of_hydra(monkeypatch, *arguments))
    assert not kept
    merges.clear()
    for merged in (1, 2, 2, 2):
        assert nodes(whole(*arguments)) == expected
        assert len(merges) == merged


def test_values_share_what_is_merged_before_them(merges):
    for steps in (1, 2, 3, 4):
        assert whole("+recipe=quickstart", f"training.steps={steps}").training.steps == steps
    assert len(merges) == 2


def test_a_changed_composition_reaches_no_other(kept):
    first = [whole() for _ in range(3)][-1]
    expected = nodes(first)
    read = {key: copy.deepcopy(result) for key, result in hydra_loader.Repository._read.items()}
    first.training.steps = 12345
    first.hydra.job.name = "changed"
    del first.model
    OmegaConf.set_readonly(first, True)
    assert nodes(whole()) == expected
    assert [nodes(result.config) for result in hydra_loader.Repository._read.values()] == [
        nodes(result.config) for result in read.values()
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Hydra: such a file is deprecated.
def test_a_file_that_hydra_merges_with_the_schema_of_its_name_is_kept_as_it_was_read(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "llama_schema.yaml").write_text("dim: 32\n")
    configs = [nodes(whole("--config-dir", str(tmp_path))) for _ in range(3)]
    assert configs[0] == configs[1] == configs[2]
    (read,) = [result.config for key, result in hydra_loader.Repository._read.items() if str(tmp_path) in str(key)]
    assert read == {"dim": 32}


@pytest.fixture
def folder(tmp_path):
    """`write(name, text)` into a folder of options, with another time than the file had."""
    (tmp_path / "model").mkdir()

    def write(name, text):
        file = tmp_path / name
        before = file.stat().st_mtime_ns if file.exists() else 0
        file.write_text(text)
        os.utime(file, ns=(before + 10**9, before + 10**9))

    write("config.yaml", "defaults: [{model: small}, _self_]\nsteps: 3\n")
    write("model/small.yaml", "layers: 1\n")
    write.folder = tmp_path
    return write


def composed(folder, *overrides):
    replace_sources()
    with initialize_config_dir(str(folder.folder), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize("name", ["config.yaml", "model/small.yaml"])
def test_a_file_that_changes_is_seen(folder, name):
    text = (folder.folder / name).read_text()
    for number in (7, 8, 9):
        folder(name, f"{text}more: {number}\n")
        for _ in range(3):
            config = composed(folder)
            assert (config if name == "config.yaml" else config.model).more == number


def test_a_file_that_is_removed_or_added_is_seen(folder):
    for _ in range(3):
        composed(folder)
    (folder.folder / "model" / "small.yaml").rename(folder.folder / "model" / "large.yaml")
    with pytest.raises(Exception, match="Could not find 'model/small'"):
        composed(folder)
    assert composed(folder, "model=large").model.layers == 1


def test_a_config_whose_source_cannot_tell_its_content_is_merged_each_time(folder, monkeypatch, merges, kept):
    monkeypatch.setattr(hydra_sources.FileConfigSource, "content", lambda self, path: None)
    for layers in (1, 2, 3):
        folder("model/small.yaml", f"layers: {layers}\n")
        assert composed(folder).model.layers == layers
    assert (len(merges), kept) == (3, {})


def test_a_source_of_another_package_need_not_tell_its_content():
    assert hydra_loader._key(SimpleNamespace(provider="a package", path="s3://bucket"), "model/small") is None


def test_only_so_many_compositions_are_kept_those_used_last(folder, kept, monkeypatch):
    monkeypatch.setattr(hydra_loader, "_MOST_COMPOSITIONS", 3)
    for number in range(6):
        folder(f"model/m{number}.yaml", f"layers: {number}\n")
        for _ in range(3):
            assert composed(folder, f"model=m{number}").model.layers == number
        assert composed(folder, "model=m0").model.layers == 0
    assert [config.model.layers for config in kept.values()] == [4, 5, 0]


@pytest.mark.parametrize(
    ("overrides", "port"), [([], 1), (["server=second"], 2), (["server=second", "place=first"], 1)]
)
def test_an_option_may_follow_the_choice_of_another_group(tmp_path, overrides, port):
    for group in ("server", "place"):
        (tmp_path / group).mkdir()
        for number, name in enumerate(("first", "second"), start=1):
            (tmp_path / group / f"{name}.yaml").write_text(f"port: {number}\n")
    (tmp_path / "config.yaml").write_text("defaults: [_self_, {server: first}, {place: '${server}'}]\n")
    replace_sources()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("config", overrides=overrides).place.port == port


def test_a_hydra_with_other_private_functions_is_refused_in_one_line(monkeypatch):
    """Under 1.4.0rc3 each verb that composes ended with a traceback."""
    monkeypatch.setattr(hydra, "__version__", "1.4.0rc3")
    with pytest.raises(ConfigError) as refused:
        importlib.reload(hydra_loader)
    assert str(refused.value) == (
        'hydra-core=1.4.0rc3: titanlab needs Hydra 1.3; pip install "hydra-core>=1.3.2,<1.4" "omegaconf>=2.3,<2.4"'
    )
