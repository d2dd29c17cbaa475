"""FLOPs from accounts; published numbers are in tests/model/test_llama_account.py."""

from titanlab.costs import ModelAccount, Operation, forward_flops, training_flops_per_token


def account(*, tied):
    parameters = {"table": (10, 4), "layer": (4, 4), "norm": (4,)}
    if not tied:
        parameters["head"] = (10, 4)
    return ModelAccount(
        parameters=parameters,
        embedding="table",
        tied={"head": "table"} if tied else {},
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=2,
        dim=4,
        vocab_size=10,
    )


def test_the_table_is_left_out():
    # Layer 16, norm 4, head 40: six times 60. Attention: 12 · 1 layer · 2 heads · 2 wide · 5 positions.
    assert training_flops_per_token(account(tied=False), seq_len=5) == 6 * 60 + 12 * 1 * 2 * 2 * 5


def test_a_tied_table_is_a_head():
    assert training_flops_per_token(account(tied=True), seq_len=5) == training_flops_per_token(
        account(tied=False), seq_len=5
    )


def test_forward_sums_operations():
    operations = [
        Operation(name="a", kind="matmul", flops=5, output=(2, 3)),
        Operation(name="b", kind="pointwise", flops=0, output=(2, 3)),
        Operation(name="c", kind="attention", flops=7, output=(2, 3)),
    ]
    assert forward_flops(operations) == 12
    assert forward_flops([]) == 0
