"""The file system `emu://` of fsspec, as a package of its own would bring it. EMULATED_STORE has host and port."""

import http.client
import io
import json
import os
from urllib.parse import quote, urlencode

from fsspec.spec import AbstractFileSystem

NAME = "EMULATED_STORE"


class EmulatedStore(AbstractFileSystem):
    """Objects of a `StoreServer`."""

    protocol = "emu"

    def _ask(self, method, name, *, body=None, headers=None, query=""):
        connection = http.client.HTTPConnection(os.environ[NAME], timeout=60)
        try:
            connection.request(method, f"/{quote(name)}{query}", body=body, headers=headers or {})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(name)
        if answer.status == 403:
            raise PermissionError(f"access denied: {name}")
        if answer.status != 200:
            raise StoreError(f"{answer.status} {answer.reason}")
        return answer, content

    def _list(self, prefix):
        _, content = self._ask("GET", "", query="?" + urlencode({"list": prefix}))
        return [{**row, "type": "file"} for row in json.loads(content)]

    def ls(self, path, detail=True, **options):
        below = self._strip_protocol(path).rstrip("/") + "/"
        rows = {}
        for row in self._list(below):
            head, slash, _ = row["name"][len(below) :].partition("/")
            rows[head] = {"name": below + head, "size": 0, "type": "directory"} if slash else row
        found = list(rows.values())
        return found if detail else [row["name"] for row in found]

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **options):
        rows = {row["name"]: row for row in self._list(self._strip_protocol(path).rstrip("/") + "/")}
        return rows if detail else list(rows)

    def info(self, path, **options):
        name = self._strip_protocol(path)
        answer, _ = self._ask("HEAD", name)
        return {"name": name, "size": int(answer.headers["Content-Length"]), "type": "file"}

    def cat_file(self, path, start=None, end=None, **options):
        headers = {} if end is None else {"Range": f"bytes={start or 0}-{end - 1}"}
        return self._ask("GET", self._strip_protocol(path), headers=headers)[1]

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._ask("PUT", self._strip_protocol(path), body=bytes(value))

    def cp_file(self, path1, path2, **options):
        self._ask("PUT", self._strip_protocol(path2), headers={"X-Copy-Source": quote(self._strip_protocol(path1))})

    def rm_file(self, path):
        self._ask("DELETE", self._strip_protocol(path))

    def _open(self, path, mode="rb", block_size=None, **options):
        assert mode == "wb", "checkpoints are read in ranges"
        return _NewObject(self, path)


class StoreError(Exception):
    """Not an OSError, like the errors of most packages of stores."""


class _NewObject(io.BytesIO):
    """Sends the object when it is closed."""

    def __init__(self, store, path):
        super().__init__()
        self._store, self._path, self._discarded = store, path, False

    def discard(self):
        self._discarded = True
        super().close()

    def close(self):
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._store.pipe_file(self._path, content)

    def __del__(self):
        if not self.closed:
            self.discard()
