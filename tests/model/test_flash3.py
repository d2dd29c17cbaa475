"""FlashAttention 3: what it needs, and how torch's flash kernel becomes it. The package is a stand-in, without kernels."""

import sys
import types

import pytest
import torch
from torch.nn import attention

from titanlab.costs import attention_order
from titanlab.costs.attention_order import Rule
from titanlab.parallelism import attention_kernels
from titanlab.techniques.model import attention as flash3
from titanlab.techniques.model.attention import InnerAttention

HOPPER = (9, 0)


@pytest.fixture
def package(monkeypatch):
    """A module that torch takes for the package: it has the names of its two operators."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define("fwd(Tensor q) -> Tensor")
    library.define("bwd(Tensor q) -> Tensor")
    module = types.ModuleType(flash3.FLASH3_PACKAGE)
    module.__spec__ = types.SimpleNamespace(name=flash3.FLASH3_PACKAGE)
    monkeypatch.setitem(sys.modules, flash3.FLASH3_PACKAGE, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    yield library
    attention.restore_flash_attention_impl(False)
    library._destroy()


def active():
    return attention.current_flash_attention_impl()


def test_torch_computes_flash_by_the_package_while_a_model_asks_for_it(package):
    InnerAttention("flash3").prepare(torch.device("cuda", 0))
    assert active() == "FA3"
    assert InnerAttention("flash3")._backends == [attention.SDPBackend.FLASH_ATTENTION]
    # torch's own operators of CUDA are registered over; so what calls them needs no change.
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_dot_product_flash_attention", "CUDA")
    InnerAttention("flash").prepare(torch.device("cuda", 0))
    assert active() is None
    # Context parallelism asks in the same way.
    assert flash3.choose_flash("flash3", HOPPER)
    assert active() == "FA3"
    assert attention_kernels.KERNELS["flash3"] is attention_kernels.KERNELS["flash"]


@pytest.mark.parametrize(("fastest", "expected"), [("flash3", "FA3"), ("cudnn", None)])
def test_auto_takes_it_where_it_was_measured_as_the_fastest(package, monkeypatch, fastest, expected):
    names = ("flash3", "cudnn", "flash") if fastest == "flash3" else ("cudnn", "flash3", "flash")
    found = (Rule(names, "bfloat16", 64, 4096), Rule(("cudnn", "flash", "efficient")))
    monkeypatch.setattr(flash3, "prefers_flash3", lambda capability: found[0].order[0] == "flash3")
    monkeypatch.setattr("titanlab.techniques.model.attention.kernel_rules", lambda capability: found)
    module = InnerAttention("auto")
    module.prepare(torch.device("cuda", 0))
    assert active() == expected
    backends = attention.SDPBackend
    flash, cudnn, efficient = backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION, backends.EFFICIENT_ATTENTION
    first = (flash, cudnn) if fastest == "flash3" else (cudnn, flash)

    def chosen(dtype, head_dim, seq_len):
        return tuple(module._chosen(torch.empty(1, 2, seq_len, head_dim, dtype=dtype, device="meta")))

    assert chosen(torch.bfloat16, 64, 4096) == (*first, backends.MATH)
    for other in ((torch.float16, 64, 4096), (torch.bfloat16, 128, 4096), (torch.bfloat16, 64, 4097)):
        assert chosen(*other) == (cudnn, flash, efficient, backends.MATH)


def test_what_it_lacks(package, monkeypatch):
    assert flash3.flash3_missing(HOPPER) is None
    assert flash3.flash3_missing(None) is None
    assert (
        flash3.flash3_missing((10, 0))[0] == "is a kernel of Hopper (compute capability 9.0), and this device has 10.0"
    )
    monkeypatch.delitem(sys.modules, flash3.FLASH3_PACKAGE)
    assert flash3.flash3_missing(HOPPER)[0] == "is a kernel of the package flash_attn_interface, which is not installed"
    with pytest.raises(ImportError, match="flash3 is a kernel of the package flash_attn_interface, which is not"):
        InnerAttention("flash3").prepare(torch.device("cuda", 0))
    # `auto` does without.
    monkeypatch.setattr(flash3, "prefers_flash3", lambda capability: True)
    assert not flash3.choose_flash("auto", HOPPER)
    for name in ("_activate", "_known", "_current", "_restore"):
        monkeypatch.setattr(flash3, name, None)
    assert "is not a kernel that torch" in flash3.flash3_missing(HOPPER)[0]
    assert not flash3.choose_flash("flash", HOPPER)


def test_a_package_without_kernels_is_named(package, monkeypatch):
    monkeypatch.setattr(flash3, "_activate", lambda name: (_ for _ in ()).throw(RuntimeError("does not expose")))
    with pytest.raises(ImportError, match="model.attention=flash3: does not expose"):
        flash3.choose_flash("flash3", HOPPER)


def test_no_measurement_of_it_is_known_yet():
    # With the first adopted row of `benchmarks/gpu_attention.py` this and docs/compile.md change.
    assert not attention_order.prefers_flash3(HOPPER)
