"""Parts in float32: which they are, where casts stand, and what FSDP2 gathers apart."""

import torch
from torch import nn

from tests import tiny
from titanlab.techniques.precision.cast import Dtypes, Units, keep_in_fp32

BF16, FP32 = torch.bfloat16, torch.float32


class Layer(nn.Module):
    """Notes the dtypes that come in, and returns them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, x, *others):
        self.seen.append([x.dtype, *(each.dtype if isinstance(each, torch.Tensor) else each for each in others)])
        return x


class Model(nn.Module):
    """The pieces of a llama of two blocks, with some left out as in a pipeline's stage."""

    def __init__(self, *pieces):
        super().__init__()
        self.layers = nn.ModuleDict()
        for piece in pieces:
            if piece.startswith("layers."):
                self.layers[piece.removeprefix("layers.")] = Layer()
            else:
                setattr(self, piece, Layer())


ALL = ("tok_embeddings", "layers.0", "layers.1", "norm", "output")


def account(**given):
    return tiny.recipe("runs", **given).model.account()


def kept(model, parts, **given):
    dtypes = Dtypes(master=FP32, compute=BF16, reduce=FP32, fp32_parts=tuple(parts))
    return keep_in_fp32(model, account(**given), dtypes)


def test_without_parts_nothing_changes():
    model = Model(*ALL)
    assert kept(model, []) == Units()
    model.norm(torch.zeros(1, dtype=BF16))
    assert model.norm.seen == [[BF16]]


def test_inputs_of_a_part_are_raised_and_its_output_is_lowered():
    model = Model(*ALL)
    units = kept(model, ["layers.1", "norm"])
    assert units == Units((model.layers["1"], model.norm), (model.norm,))
    outputs = [model.layers[name](torch.zeros(1, dtype=BF16)).dtype for name in ("0", "1")]
    assert outputs == [BF16, BF16]
    assert (model.layers["0"].seen, model.layers["1"].seen) == ([[BF16]], [[FP32]])


def test_only_tensors_of_the_compute_dtype_are_cast():
    model = Model(*ALL)
    kept(model, ["norm"])
    model.norm(torch.zeros(1, dtype=BF16), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64), 3)
    assert model.norm.seen == [[FP32, torch.int64, torch.float64, 3]]
    # Tokens come in and float32 goes out: it is lowered too.
    assert model.norm(torch.zeros(1)).dtype == BF16


def test_logits_stay_in_float32():
    model = Model(*ALL)
    units = kept(model, ["head"])
    assert units == Units((model.output,), (model.output,))
    assert model.output(torch.zeros(1, dtype=BF16)).dtype == FP32


def test_a_stage_has_the_parts_of_its_own_pieces():
    model = Model("layers.1", "norm", "output")
    assert kept(model, ["embedding", "layers.0"]) == Units()
    assert kept(model, ["embedding", "layers.*"]) == Units((model.layers["1"],), ())


def test_a_shared_table_is_in_the_roots_unit_and_the_others_are_apart():
    model = Model(*ALL)
    units = kept(model, ["embedding", "head"], tied_embeddings=True)
    assert units == Units((model.tok_embeddings, model.output, model), (model.norm,))
    # A part that does not have the table leaves it where it is.
    other = Model(*ALL)
    assert kept(other, ["norm"], tied_embeddings=True) == Units((other.norm,), (other.norm,))


def test_a_piece_without_parameters_needs_no_unit():
    model = Model(*ALL)
    model.norm = nn.Identity()
    assert kept(model, ["norm"]) == Units((model.norm,), ())
