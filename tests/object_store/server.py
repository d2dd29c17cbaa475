"""An object store over HTTP, with the semantics of S3: whole objects, ranges, lists by prefix, no rename, no append.

An object appears when all of its bytes have arrived, and never before. Faults are planted by method and name.
"""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Fault:
    """What goes wrong with the next requests.

    Attributes:
        kind: `503`, `403`; `short`: a body without its end; `cut`: the connection ends before the answer.
        count: how many requests it meets; -1: all.
    """

    method: str
    part_of_name: str
    kind: str
    count: int = 1


@dataclass
class Store:
    """The objects of a server.

    Attributes:
        log: method, name, and range of every request that was answered.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    log: list[tuple[str, str, tuple[int, int] | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, method, name):
        """The kind of the fault that meets a request; None: it is answered."""
        with self.lock:
            for fault in self.faults:
                if fault.count and fault.method == method and fault.part_of_name in name:
                    fault.count -= 1
                    return fault.kind
        return None

    def below(self, prefix):
        """Names of objects."""
        return sorted(name for name in self.objects if name.startswith(prefix))


class Handler(BaseHTTPRequestHandler):
    """Answers one request after the other."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        """Silent."""

    def _begun(self):
        parts = urlsplit(self.path)
        name = unquote(parts.path).lstrip("/")
        fault = self.server.store.fault(self.command, name)
        if fault == "cut":
            self.close_connection = True
            self.connection.close()
        elif fault in ("503", "403"):
            # A body that was sent must be read, or the next request would begin inside of it.
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(int(fault), b"planted")
        return name, parse_qs(parts.query), fault

    def _answer(self, code, body=b"", *, length=None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _object(self, name):
        content = self.server.store.objects.get(name)
        if content is None:
            self._answer(404)
        return content

    def do_HEAD(self):
        """Size of an object."""
        name, _, fault = self._begun()
        if fault in (None, "short") and (content := self._object(name)) is not None:
            self._answer(200, length=len(content))

    def do_GET(self):
        """Bytes of an object, or a list."""
        name, query, fault = self._begun()
        store = self.server.store
        if fault not in (None, "short"):
            return
        if "list" in query:
            rows = [{"name": each, "size": len(store.objects[each])} for each in store.below(query["list"][0])]
            self._answer(200, json.dumps(rows).encode())
            return
        content = self._object(name)
        if content is None:
            return
        wanted = self.headers.get("Range")
        first, end = 0, len(content)
        if wanted:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            end = last + 1
        store.log.append(("GET", name, (first, end)))
        body = content[first:end]
        self._answer(200, body[: len(body) // 2] if fault == "short" else body)

    def do_PUT(self):
        """Make an object, from bytes or from another object."""
        name, _, fault = self._begun()
        if fault not in (None, "short"):
            return None
        store, source = self.server.store, self.headers.get("X-Copy-Source")
        if source:
            body = store.objects.get(unquote(source))
            if body is None:
                return self._answer(404)
        else:
            size = int(self.headers["Content-Length"])
            body = self.rfile.read(size)
            if len(body) < size:
                return None  # The client has died: nothing is stored.
        if fault == "short":
            body = body[: len(body) // 2]
        store.log.append(("PUT", name, None))
        store.objects[name] = body
        return self._answer(200)

    def do_DELETE(self):
        """Remove an object."""
        name, _, fault = self._begun()
        if fault is None:
            self.server.store.log.append(("DELETE", name, None))
            self._answer(200 if self.server.store.objects.pop(name, None) is not None else 404)


class StoreServer(ThreadingHTTPServer):
    """A store at a free port of this host."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = Store()

    @property
    def endpoint(self):
        """Host and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that dies is not an error of the server."""
