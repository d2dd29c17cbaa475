"""What a module's source takes from torch, by name, and whether a list of reviewed names and a torch have it."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

GUARDED = "guarded"
OURS = "ours"

# The code gets objects of these from calls and arguments: an attribute by a name that one of them has is taken for its.
OBJECTS = """
    torch.Tensor torch.Generator torch.cuda.Event torch.device torch.finfo torch.nn.Module torch.optim.Optimizer
    torch.autograd.Function torch.autograd.function.FunctionCtx torch._library.custom_ops.CustomOpDef
    torch._ops.OpOverload torch._C.FunctionSchema torch._C.Argument torch.backends.cuda.SDPAParams
    torch.utils._python_dispatch.TorchDispatchMode torch.utils.tensorboard.SummaryWriter
    torch.distributed.ProcessGroup torch.distributed.Work torch.distributed.P2POp torch.distributed.Store
    torch.distributed.device_mesh.DeviceMesh torch.distributed.tensor.DTensor torch.distributed.tensor.Placement
    torch.distributed.fsdp.FSDPModule torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState
    torch.nn.parallel.DistributedDataParallel
    torch.distributed._functional_collectives.AsyncCollectiveTensor
    torch.distributed.pipelining.PipelineStage torch.distributed.pipelining.schedules._Action
    torch.distributed.pipelining.schedules._PipelineScheduleRuntime
    torch.distributed.checkpoint.FileSystemReader torch.distributed.checkpoint.metadata.Metadata
""".split()
_PLAIN = {name for kind in (str, bytes, list, dict, set, tuple, int, float, slice, Path) for name in dir(kind)}


class Use(NamedTuple):
    """A name as the source has it.

    name: `torch.a.b`, or `.b` of an object of unknown type.
    arguments: what it is called with, if it is: keywords, or `#14` for an operator's 14 by position.
    guarded: looked up by `getattr` with a default, or behind `hasattr`.
    """

    name: str
    line: int
    arguments: frozenset[str] = frozenset()
    guarded: bool = False


class Entry(NamedTuple):
    """A line of the list. since: a version of torch, `guarded`, or `ours` (`.name` is of the package's own objects)."""

    since: str
    arguments: frozenset[str]


class Reader(ast.NodeVisitor):
    """Collects the uses of one module."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.mentioned: set[str] = set()  # every attribute and method by its last name, whoever's
        self._known: ChainMap[str, str] = ChainMap()
        self._own = False  # `self` is an object of a class that has nothing of torch's
        self._behind: frozenset[str] = frozenset()
        self._base: str | None = None

    def _resolved(self, node: ast.AST) -> str | None:
        """The full dotted name of an expression that begins with an imported one."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._resolved(node.value)
            return base and f"{base}.{node.attr}"
        if self._base and isinstance(node, ast.Call) and ast.unparse(node) == "super()":
            return self._base
        return None

    def _record(self, name: str, node: ast.AST, *, guarded: bool = False, arguments: Iterable[str] = ()) -> None:
        name = name.removesuffix(".__init__")
        self.mentioned.add(name.rpartition(".")[2])
        line = getattr(node, "lineno", 0)
        if name.startswith("."):
            self.uses.append(Use(name, line, frozenset(arguments), guarded))
        elif is_torch(name):
            own, *rest = split(name)
            self.uses.append(Use(own, line, frozenset(() if rest else arguments), guarded or name in self._behind))
            self.uses.extend(Use(f".{each}", line) for each in rest)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._known[alias.asname or top] = alias.name if alias.asname else top
            self._record(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self._record(f"{node.module}.{alias.name}", node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        value = node.value
        if isinstance(value, ast.Call) and value.args and self._resolved(value.func) == "functools.partial":
            value = value.args[0]
        name = self._resolved(value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._known.pop(target.id, None) if name is None else self._known.update({target.id: name})

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.mentioned.add(node.name)
        before, self._known = self._known, self._known.new_child()
        self.generic_visit(node)
        self._known = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self._own, self._base
        bases = [name for name in map(self._resolved, node.bases) if name and is_torch(name)]
        self._own, self._base = not bases, bases[0] if bases else None
        for method in node.body:
            for base in bases:
                if isinstance(method, ast.FunctionDef) and method.name in attributes(base):
                    self._record(f"{base}.{method.name}", method)
        self.generic_visit(node)
        self._own, self._base = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._resolved(node)
        if name is not None:
            self._record(name, node)
            return
        if not (self._own and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            self._record(f".{node.attr}", node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        function, positional = node.func, node.args
        looked_up = self._looked_up(node)
        if looked_up:
            self._record(looked_up, node, guarded=len(positional) > 2 or ast.unparse(function) == "hasattr")
        elif self._resolved(function) == "functools.partial" and positional:
            function, positional = positional[0], positional[1:]
        name = self._resolved(function)
        if name is None and isinstance(function, ast.Attribute):
            name = f".{function.attr}"
        if name:
            if name.startswith("torch.ops.") and not any(isinstance(each, ast.Starred) for each in positional):
                self._record(name, node, arguments=[f"#{len(positional)}"])
            self._record(name, node, arguments=[each.arg for each in node.keywords if each.arg])
        self.generic_visit(node)

    def _looked_up(self, node: ast.Call) -> str | None:
        """The name that `getattr` or `hasattr` is asked for."""
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[of, ast.Constant(str(name)), *_]):
                return f"{self._resolved(of) or ''}.{name}"
        return None

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        body, otherwise = ([each] if isinstance(each, ast.expr) else each for each in (node.body, node.orelse))
        before = self._behind
        if isinstance(node.test, ast.Call) and ast.unparse(node.test.func) == "hasattr":
            self._behind |= {self._looked_up(node.test) or ""}
        for each in body:
            self.visit(each)
        self._behind = before
        for each in otherwise:
            self.visit(each)

    visit_IfExp = visit_If  # noqa: N815


def is_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def walk(name: str) -> Iterator[tuple[str, Any]]:
    """Each part of a dotted name with the object that it leads to in the installed torch, as far as there is one."""
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            try:
                found = importlib.import_module(path)
            except ImportError:
                return
        yield path, found


def split(name: str) -> list[str]:
    """`torch.distributed.group.WORLD.group_name` → that up to WORLD, the last that a module or a class has; the rest."""
    spaces = (ModuleType, type, torch._ops._OpNamespace, torch._ops.OpOverloadPacket)
    for path, found in walk(name):
        if not isinstance(found, spaces):
            return [path, *name[len(path) :].split(".")[1:]]
    return [name]


@functools.cache
def attributes(path: str) -> frozenset[str]:
    """What objects of a class have: by the class, by its annotations, and by what its methods give to `self`."""
    found = dict(walk(path)).get(path)
    names = set(dir(found))
    for cls in getattr(found, "__mro__", ()):
        names |= set(vars(cls).get("__annotations__", ()))
        if is_torch(cls.__module__):
            with contextlib.suppress(OSError):  # a class that is written in C++ has no source
                names |= set(re.findall(r"\bself\.(\w+)\b[^=\n(]*=(?!=)", inspect.getsource(cls)))
    return frozenset(names)


def read(source: str) -> Reader:
    """What a module uses. One that does not import torch has no objects of torch's."""
    reader = Reader()
    if "torch" in source:
        reader.visit(ast.parse(source))
    if not any(is_torch(use.name) for use in reader.uses):
        reader.uses.clear()
        reader.mentioned.clear()
    return reader


def reviewed(text: str) -> dict[str, Entry]:
    """The list: a name a line, then the torch that has it, `guarded` or `ours`, then what it is called with."""
    entries: dict[str, Entry] = {}
    for line in text.splitlines():
        words = line.partition("# ")[0].split()
        if words:
            name, since, *arguments = words
            assert name not in entries, f"{name} is listed twice"
            entries[name] = Entry(since, frozenset(arguments))
    return entries


def unknown(use: Use, entries: Mapping[str, Entry]) -> str | None:
    """What the list has to say of a use and does not."""
    if use.name.startswith("."):
        attribute = use.name[1:]
        owners = [path for path in OBJECTS if attribute in attributes(path)]
        if attribute in _PLAIN or attribute.startswith("__") or not owners:
            return None
        of = [entry for name, entry in entries.items() if name.endswith(use.name)]
        name = f"{owners[0]}{use.name}" + (f" (or of {', '.join(owners[1:])})" if owners[1:] else "")
    else:
        of = [entries[use.name]] if use.name in entries else []
        name = use.name
    if not use.guarded:
        of = [entry for entry in of if entry.since != GUARDED]
    if not of:
        return name
    missing = use.arguments - frozenset[str]().union(*(entry.arguments for entry in of))
    return f"{name} called with {' '.join(sorted(missing))}" if missing else None


def stale(entries: Mapping[str, Entry], readers: Iterable[Reader]) -> Iterator[str]:
    """What the list says and the package does not use."""
    mentioned: set[str] = set()
    arguments: dict[str, set[str]] = {}
    for reader in readers:
        mentioned |= reader.mentioned
        for use in reader.uses:
            arguments.setdefault(use.name, set()).update(use.arguments)
    for name, entry in entries.items():
        owner, _, last = name.rpartition(".")
        is_used = last in mentioned if owner in OBJECTS or not owner else name in arguments
        unused = entry.arguments - arguments.get(name, set()) - arguments.get(f".{last}", set())
        if not is_used or unused:
            yield " ".join([name, *sorted(unused)])


def lacking(name: str, entry: Entry) -> str | None:
    """What a line of the list says and the installed torch has not."""
    if entry.since in (GUARDED, OURS):
        return None
    owner, _, last = name.rpartition(".")
    found = dict(walk(name))
    if name not in found:
        return None if name == "torch" or (owner in OBJECTS and last in attributes(owner)) else name
    if isinstance(found[name], torch._ops.OpOverload):
        arguments = found[name]._schema.arguments
        least = sum(not argument.has_default_value() for argument in arguments)
        taken = {f"#{count}" for count in range(least, len(arguments) + 1)}
        taken |= {argument.name for argument in arguments if argument.kwarg_only}
    else:
        taken = parameters(found[name], last)
    missing = entry.arguments - taken
    return None if not missing or "**" in taken else f"{name} called with {' '.join(sorted(missing))}"


def parameters(function: Any, name: str) -> set[str]:
    """Names of what a function takes; `**` stands for any."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Functions in C++ have their parameters in torch's stubs or in their documentation.
        texts = [path.read_text() for path in (Path(torch.__file__).parent / "_C").glob("*.pyi")]
        signatures = re.findall(rf"def {name}\((.*?)\) *->", "".join(texts), re.DOTALL)
        # A class has them in its __init__.
        signatures += re.findall(rf"class {name}\(\w+\):\n +def __init__\((.*?)\) *->", "".join(texts), re.DOTALL)
        signatures += re.findall(rf"{name}\((.*?)\)", function.__doc__ or "", re.DOTALL)
        return {word for signature in signatures for word in re.findall(r"(\w+) *[:=]", signature)}
    return {"**" if each.kind is each.VAR_KEYWORD else each.name for each in found.values()}
