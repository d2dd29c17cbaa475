"""data=files: text, JSONL or parquet files, tokenised into the cache."""

from __future__ import annotations

from titanlab.data.corpus.text_files import Corpus, corpus_of
from titanlab.data.files_schema import Files
from titanlab.data.prepared import PreparedText


class FilesSource(PreparedText[Files]):
    """The files that a config names."""

    def find_corpus(self) -> Corpus:
        return corpus_of(self.config.files, self.config.text_field)
