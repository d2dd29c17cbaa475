"""Reading text, JSONL and parquet: every document whole, every bad file named."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titanlab.data.corpus import Corpus, corpus_of, matching
from titanlab.errors import ConfigError

TEXTS = ["one\n", "two\r\n\ttabs  ", "drei – 中文 🎉"]


def documents(*files, text_field="text"):
    return list(Corpus(files=files, text_field=text_field).documents())


def test_text_is_read_exactly(tmp_path):
    files = []
    for number, text in enumerate([*TEXTS, ""]):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_bytes(text.encode())
    assert documents(*files) == TEXTS


def test_json_lines(tmp_path):
    rows = [{"body": text, "n": 1} for text in TEXTS] + [{"body": None}, {"body": ""}]
    content = "".join(json.dumps(row) + "\n" for row in rows) + "\n\n"
    for name in ("a.jsonl", "b.ndjson", "c.json"):
        (tmp_path / name).write_text(content)
        assert documents(tmp_path / name, text_field="body") == TEXTS
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(content)
    assert documents(tmp_path / "d.jsonl.gz", text_field="body") == TEXTS


def zstd(content):
    """In two frames, as tools write that compress on several cores."""
    middle = len(content) // 2
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (content[:middle], content[middle:]))


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_files(tmp_path, ending):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "long " * 100_000])
    lines, plain = tmp_path / f"a.jsonl{ending}", tmp_path / f"a.txt{ending}"
    lines.write_bytes(PACKERS[ending](rows.encode()))
    plain.write_bytes(PACKERS[ending](TEXTS[2].encode()))
    assert documents(lines) == [*TEXTS, "long " * 100_000]
    assert documents(plain) == [TEXTS[2]]
    for content in (lines.read_bytes()[:-20], b"no such format " * 10):
        lines.write_bytes(content)
        with pytest.raises(
            ConfigError, match=rf"a\.jsonl{ending}: is not a whole {ending} file \(.*\); fetch it again"
        ):
            documents(lines)


@pytest.mark.parametrize(
    ("ending", "builder"), [(".csv", "csv"), (".tsv", "csv"), (".CSV.gz", "csv"), (".arrow", "arrow")]
)
def test_a_table_is_refused(tmp_path, ending, builder):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / f"b{ending}").write_text("text,n\nx,1\n")
    with pytest.raises(
        ConfigError, match=rf"b{ending}: is a table, and not text; try data=hf data\.path={builder} "
    ) as caught:
        corpus_of(str(tmp_path), "text").check()
    assert caught.value.key == "data.files"


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip", "a.tgz"])
def test_an_archive_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError, match=rf"{name}: is an archive, and not text; unpack it"):
        corpus_of(str(tmp_path), "text").check()


def test_what_describes_a_dataset_is_left_out_beside_its_data(tmp_path):
    about = ["LICENSE", "README.md", "dataset_infos.json", "en/_SUCCESS"]
    for name in [*about, "en/1.jsonl", "en/2.jsonl.gz", "en/readme_pages.jsonl", "notes.md", "state.jsonl"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}')
    read = ["en/1.jsonl", "en/2.jsonl.gz", "en/readme_pages.jsonl", "notes.md", "state.jsonl"]
    for pattern in (tmp_path, f"{tmp_path}/**"):
        corpus = corpus_of(str(pattern), "text")
        assert [str(file.relative_to(tmp_path)) for file in corpus.files] == read
        assert corpus.in_words() == (
            "4 .jsonl as JSON, one object a line; 1 .md as text, one document a file; "
            "left out: LICENSE, README.md, _SUCCESS, dataset_infos.json"
        )
    # Whoever names a file has it read.
    named = corpus_of(f"{tmp_path / 'README.md'}{os.pathsep}{tmp_path}", "text")
    assert {file.name for file in named.left_out} == {"LICENSE", "dataset_infos.json", "_SUCCESS"}


def test_a_readme_among_texts_is_one_of_them(tmp_path):
    for name in ("README.md", "a.py", "b.XML", "c"):
        (tmp_path / name).write_text("x")
    corpus = corpus_of(str(tmp_path), "text")
    assert len(corpus.files) == 4
    assert corpus.in_words() == "1 .md, 1 .py, 1 .xml, 1 without an ending as text, one document a file"
    for number in range(7):
        (tmp_path / f"x.e{number}").write_text("x")
    assert "5 others as text" in corpus_of(str(tmp_path), "text").in_words()


def test_two_columns_of_one_name_are_refused(tmp_path):
    column = pa.array(["a"])
    pq.write_table(pa.Table.from_arrays([column, column, column], ["text", "id", "text"]), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"data\.text_field=text: is the name of 2 columns in .*a\.parquet; write the file"
    ):
        documents(tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", text_field="id") == ["a"]


def test_half_surrogates_become_question_marks(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\u00e9"}\n')
    assert documents(tmp_path / "a.jsonl") == ["a?b é"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet(tmp_path, kind):
    column = pa.array([*TEXTS, None, ""], pa.string()).cast(kind)
    pq.write_table(pa.table({"text": column, "other": range(5)}), tmp_path / "a.parquet", row_group_size=2)
    assert documents(tmp_path / "a.parquet") == TEXTS


def test_matching(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d[1].md", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)

    def names(pattern):
        return [str(file.relative_to(tmp_path)) for file in matching(pattern)]

    assert names("*.txt") == ["a.txt", "b.txt"]
    assert names("**/*.txt") == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert names(".") == ["a.txt", "b.txt", "d[1].md", "deep/er/c.txt"]
    assert names("d[1].md") == ["d[1].md"]
    assert names(f"b.txt{os.pathsep}a.txt{os.pathsep}*.txt") == ["a.txt", "b.txt"]


def test_links_to_folders_above_are_not_followed(tmp_path):
    """With one such link each file was read 81 times; with two, the search did not end."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name, target in {"a/up": "..", "a/self": ".", "b/up": "../b", "b/loop": "loop"}.items():
        (tmp_path / name).symlink_to(target)
    for name in ("a/1.txt", "b/2.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "linked").symlink_to("b")
    for pattern in ("", "**", "**/*.txt", "**/**/*.txt", "**/[12].txt"):
        names = [str(file.relative_to(tmp_path)) for file in matching(os.path.join(tmp_path, pattern))]
        assert names == ["a/1.txt", "b/2.txt", "linked/2.txt"], pattern
    names = [str(file.relative_to(tmp_path)) for file in matching(f"{tmp_path}/[ab]/**/*.txt")]
    assert names == ["a/1.txt", "a/up/b/2.txt", "a/up/linked/2.txt", "b/2.txt"]


def test_sample_is_spread_over_the_files(tmp_path):
    sizes = {"a": 10, "b": 5000, "c": 300, "d": 8000}
    for name, size in sizes.items():
        (tmp_path / name).write_text(name * size)
    sample = "".join(Corpus(files=matching(str(tmp_path))).sample(1000))
    counts = {name: sample.count(name) for name in sizes}
    assert counts["a"] == 10
    assert 300 <= counts["b"] == counts["d"]
    assert 1000 <= sum(counts.values()) <= 1010
    assert len("".join(Corpus(files=matching(str(tmp_path))).sample(10**6))) == sum(sizes.values())


@pytest.mark.parametrize(
    ("name", "content", "key", "message"),
    [
        ("a.jsonl", b'{"text": "\xff"}\n', "data.files", r"a\.jsonl:1: is not UTF-8"),
        ("a.jsonl", b"[1, 2]\n", "data.files", r"a\.jsonl:1: is JSON, but not an object"),
        ("a.jsonl", b'{"text": 5}\n', "data.text_field", r"=text: is int, not text"),
        ("a.json", b'[\n{"text": "a"}\n]', "data.files", r"a\.json:1: is not JSON"),
        ("a.jsonl", b"[" * 100_000, "data.files", r"is not JSON"),
        ("a.parquet", b"", "data.files", r"a\.parquet: is not a readable Parquet file"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "data.files", "is a pointer of Git LFS"),
        ("a.txt", gzip.compress(b"text", mtime=0), "data.files", r"is compressed with gzip; .* the ending \.gz"),
        ("a.jsonl", bz2.compress(b'{"text": "a"}'), "data.files", r"is compressed with bzip2; .* the ending \.bz2"),
        ("a.jsonl", lzma.compress(b'{"text": "a"}'), "data.files", r"is compressed with xz; .* the ending \.xz"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd\x04", "data.files", r"is compressed with zstd; .* the ending \.zst"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "data.files", "is compressed with gzip"),
        ("a.txt", b"PK\x03\x04\x14\x00", "data.files", "is a zip archive, and not text; unpack it"),
        ("a.jsonl", b"PAR1\x15\x04", "data.files", r"is parquet; give it the ending \.parquet"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "data.files", "begins as UTF-16 text does; .*iconv -f UTF-16"),
        ("a.txt", "text".encode("utf-16"), "data.files", "begins as UTF-16 text does; .*iconv -f UTF-16"),
        ("a.txt.gz", b"plain", "data.files", r"is not a whole .gz file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, key, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        documents(tmp_path / name)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_bad_parquet_columns_are_named(tmp_path):
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"data\.text_field=text: is int64, not text"):
        documents(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"data\.text_field=content: is not in .*; its columns are: text, body"):
        documents(tmp_path / "a.parquet", text_field="content")


def test_a_file_that_vanished(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        documents(tmp_path / "gone.txt")


@pytest.mark.parametrize("pattern", ["none/*.txt", "none.txt", "empty"])
def test_patterns_that_match_nothing(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data\.files=.*: (matches no file|has no files); check the path"):
        matching(pattern)
