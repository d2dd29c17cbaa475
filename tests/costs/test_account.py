"""The sums that accounts answer themselves."""

from titanlab.costs import ModelAccount


def test_counts():
    untied = ModelAccount(
        parameters={"table": (10, 4), "head": (10, 4), "scale": (4,)},
        embedding="table",
        tied={},
        layers=0,
        heads=1,
        kv_heads=1,
        head_dim=4,
        dim=4,
        vocab_size=10,
    )
    assert (untied.parameter_count, untied.embedding_count) == (84, 40)
    tied = ModelAccount(
        parameters={"table": (10, 4), "scale": (4,)},
        embedding="table",
        tied={"head": "table"},
        layers=0,
        heads=1,
        kv_heads=1,
        head_dim=4,
        dim=4,
        vocab_size=10,
    )
    assert (tied.parameter_count, tied.embedding_count) == (44, 0)
