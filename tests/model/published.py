"""The models of conf/model as their schema, and what is published about them."""

from pathlib import Path

import yaml

from titanlab.techniques.model.llama_schema import Llama, Mixtral, Qwen3, Qwen3Moe

FOLDER = Path(__file__).parents[2] / "conf" / "model"
SCHEMAS = {"llama_schema": Llama, "qwen3_schema": Qwen3, "qwen3_moe_schema": Qwen3Moe, "mixtral_schema": Mixtral}
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# Parameters: of the released checkpoints. The 34B of Llama 2 was not released; the count is that of Code Llama
# 34B, which has its sizes. llama3_405b has the sizes of the released 3.1 405B. Of the tied Qwen3 the head is not
# counted a second time, though their checkpoints hold it.
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_34b": 33_743_970_304,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
}
# FLOPs per token at a sequence length, by 6(N − N_emb) + 12·L·H·Q·T.
FLOPS_PER_TOKEN = {
    ("llama2_7b", 4096): 46_086_512_640,
    ("llama3_8b", 8192): 57_914_449_920,
    ("llama3_1_8b", 8192): 57_914_449_920,
    ("llama3_70b", 8192): 481_442_709_504,
    ("llama3_405b", 8192): 2_625_449_459_712,
    ("llama3_1_405b", 8192): 2_625_449_459_712,
}


def load(name, **changes):
    """The schema with the values of conf/model/NAME.yaml, and some of them changed."""
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    schema, own = values.pop("defaults")
    assert own == "_self_"
    return SCHEMAS[schema](**{**values, **changes})
