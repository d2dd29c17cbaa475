"""What a kind of data need not define: documents, and rules of its own."""

from __future__ import annotations

import pytest

from titanlab.data import DataConfig
from titanlab.data.contract import DataSource


class Plain(DataSource):
    """The least that a kind of data defines."""

    def fingerprint(self):
        return ""

    def prepare(self, *, report):
        pass

    def tokenizer(self):
        return None

    def vocab_size(self):
        return 2

    def open_train(self, **given):
        raise NotImplementedError

    def open_validation(self, **given):
        raise NotImplementedError


class Documents(Plain):
    """A kind whose separators are known only after `prepare`."""

    def separators(self):
        raise RuntimeError("not prepared")


class Inherited(Documents):
    pass


def test_documents_are_those_of_kinds_that_say_where_they_end():
    assert not Plain().has_documents
    assert Plain().separators() is None


def test_whether_there_are_documents_is_known_before_the_data_is_prepared():
    assert Documents().has_documents
    assert Inherited().has_documents


def test_without_rules_every_setting_passes():
    Plain().check(seq_len=0, global_batch=0, ranks=0, vocab_size=0, validation_sequences=0)

    class Config(DataConfig):
        kind = "x"

        def implementation(self):
            return Plain()

    assert Config().check(None) is None
    assert Config().document_mask is False


@pytest.mark.parametrize("name", sorted(DataSource.__abstractmethods__))
def test_a_kind_that_lacks_a_method_is_no_kind(name):
    missing = type("Missing", (Plain,), {name: getattr(DataSource, name)})
    with pytest.raises(TypeError, match=name):
        missing()
