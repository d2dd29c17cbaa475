"""The mode of wandb, from its config, the environment and netrc."""

from titanlab.techniques.tracker.trackers_schema import Wandb
from titanlab.techniques.tracker.wandb import has_key, resolve_mode


def test_which_mode(tmp_path):
    home = {"HOME": str(tmp_path)}
    key = {**home, "WANDB_API_KEY": "x"}
    assert resolve_mode(Wandb(), home) == "offline"
    assert resolve_mode(Wandb(), key) == "online"
    assert resolve_mode(Wandb(), {**key, "WANDB_MODE": "offline"}) == "offline"
    assert resolve_mode(Wandb(), {**key, "WANDB_MODE": "disabled"}) == "off"
    assert resolve_mode(Wandb(), {**home, "WANDB_MODE": "online"}) == "offline"
    assert resolve_mode(Wandb(mode="offline"), key) == "offline"
    assert resolve_mode(Wandb(mode="online"), {**key, "WANDB_MODE": "offline"}) == "online"
    assert resolve_mode(Wandb(mode="off"), key) == "off"


def test_where_a_key_may_be(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert not has_key(home)
    (tmp_path / ".netrc").write_text("machine example.org login user password x\n")
    assert not has_key(home)
    assert has_key({**home, "WANDB_BASE_URL": "https://example.org"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_key(home)
    (tmp_path / "other").write_text("broken [")
    assert not has_key({**home, "NETRC": str(tmp_path / "other")})
    assert has_key({"HOME": str(tmp_path / "none"), "WANDB_IDENTITY_TOKEN_FILE": "f"})
