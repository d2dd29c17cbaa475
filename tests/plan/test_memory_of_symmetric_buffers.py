"""Symmetric memory is a pool of its own: its buffers count at every moment of a step."""

from tests.plan.recipes import SMALL, made
from titanlab.plan.memory import memory


def buffers(**given):
    (rank,) = memory(made(model=SMALL, batch=64, shard=8, **given))
    return rank.moment, rank.items["communication buffers"], rank.allocated


def test_buffers_that_stay_are_counted():
    moment, plain, least = buffers(seq_len=512)
    again, found, most = buffers(seq_len=512, symmetric_memory=True)
    dim, ffn, vocabulary, kv = 256, 768, 2048, 128
    block = 2 * (2 * dim * dim + 2 * dim * kv + 3 * dim * ffn + 2 * dim)
    edges = 2 * (2 * vocabulary * dim + dim)
    assert moment == again
    assert plain == (block if moment in ("backward", "end") else 0)
    assert found == 2 * block + edges + (0 if moment in ("backward", "end") else 2 * edges)
    assert most - least == found - plain


def test_parameters_that_are_never_freed_have_buffers_too():
    _, plain, least = buffers(seq_len=512, reshard_after_forward="never")
    _, found, most = buffers(seq_len=512, reshard_after_forward="never", symmetric_memory=True)
    assert plain == 0
    assert found == most - least > 0
