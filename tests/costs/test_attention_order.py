"""The table of attention kernels: which measurement decides, and what decides where there is none."""

import json
import re

import pytest

from titanlab.costs import FLASH3, FUSED, kernel_rules, order, with_one_flash
from titanlab.costs.attention_order import TABLE, rules_of

HOPPER = (9, 0)


def row(seq_len, *, capability=HOPPER, dtype="bfloat16", head_dim=128, **ms):
    return {
        "capability": list(capability),
        "dtype": dtype,
        "head_dim": head_dim,
        "seq_len": seq_len,
        "ms": ms,
        "source": f"measured at {seq_len}",
    }


TABLE_WITH_ROWS = {
    "published": [{"capability": [9], "first": "cudnn", "source": "a page"}],
    "measured": [
        row(4096, flash3=1.0, cudnn=2.0, flash=3.0, efficient=None),
        row(1024, flash3=2.0, cudnn=1.0, flash=3.0, efficient=4.0),
        row(1024, dtype="float16", efficient=1.0, flash=2.0),
        row(1024, capability=(8, 0), efficient=1.0, flash=2.0),
    ],
}


def first_fit(found, *inputs):
    return next(rule for rule in found if rule.fits(*inputs))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (("bfloat16", 128, 4096), (FLASH3, "cudnn", "flash", "efficient")),
        (("bfloat16", 128, 100_000), (FLASH3, "cudnn", "flash", "efficient")),
        # The lengths' bound is at 2048, halfway as a factor.
        (("bfloat16", 128, 2049), (FLASH3, "cudnn", "flash", "efficient")),
        (("bfloat16", 128, 2048), ("cudnn", FLASH3, "flash", "efficient")),
        (("bfloat16", 128, 16), ("cudnn", FLASH3, "flash", "efficient")),
        # What was not measured comes last, in the published order.
        (("float16", 128, 1024), ("efficient", "flash", "cudnn")),
        (("bfloat16", 64, 1024), ("cudnn", "flash", "efficient")),
        (("float32", 128, 1024), ("cudnn", "flash", "efficient")),
        ((None, None, None), ("cudnn", "flash", "efficient")),
    ],
)
def test_the_nearest_measurement_of_the_same_kind_decides(inputs, expected):
    assert first_fit(rules_of(TABLE_WITH_ROWS, HOPPER), *inputs).order == expected


def test_a_rule_says_where_it_is_from():
    found = rules_of(TABLE_WITH_ROWS, HOPPER)
    assert [rule.source for rule in found] == ["measured at 1024", "measured at 4096", "measured at 1024", "a page"]
    # The same first number of the capability is the same published row, but another measurement.
    assert rules_of(TABLE_WITH_ROWS, (9, 1))[0].source == "a page"
    assert rules_of(TABLE_WITH_ROWS, (7, 5))[0].source == "no measurement is known; torch's own first choice"


def test_there_is_one_flash_kernel_at_a_time():
    names = (FLASH3, "cudnn", "flash", "efficient")
    assert with_one_flash(names, has_flash3=False) == ("cudnn", "flash", "efficient")
    assert with_one_flash(names, has_flash3=True) == (FLASH3, "cudnn", "efficient")
    assert with_one_flash(("cudnn", "flash"), has_flash3=True) == ("cudnn", FLASH3)
    assert order(FLASH3, HOPPER) == (FLASH3, "cudnn", "efficient")
    assert order("flash", HOPPER) == ("flash", "cudnn", "efficient")


def test_the_table_of_the_package_has_a_source_for_every_row():
    table = json.loads(TABLE.read_text())
    assert {tuple(row["capability"]) for row in table["published"]} == {(8,), (9,), (10,), (12,)}
    for each in table["published"]:
        assert each["first"] in FUSED
        assert re.search(r"\w+/\w+#\d+", each["source"])
    for each in table["measured"]:
        assert each["source"].startswith("benchmarks/gpu_attention.py, ")
        assert order(
            "auto", tuple(each["capability"]), dtype=each["dtype"], head_dim=each["head_dim"], seq_len=each["seq_len"]
        )
    assert kernel_rules(HOPPER)[-1].order[0] == "cudnn"
