"""Writes docs/api, the reference of the public names, from the signatures, docstrings and YAML files of the sources.

`python docs/build_api.py` writes the pages, and a test holds them against `pages()`. It reads syntax trees and lines
and imports nothing of what it describes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = "Written by `python docs/build_api.py` from the sources: edit those, and run it again."
SECTION = re.compile(r"# -{20,} (.+)")
COLUMN = re.compile(r"(?P<names>[\w`][\w`.,/ ]*?) {2,}(?P<text>\S.*)")
KEY = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: (?P<value>[^#]*?))?(?: *# (?P<meaning>.*))?")
LINE = 100


@dataclass(frozen=True)
class Part:
    """Names of one file. A name may bring the methods that are shown, as in `Engine.step`; without them all are."""

    heading: str
    file: str
    names: tuple[str, ...] = ()  # none: everything public, under the section comments of the file


HANDED_OUT = ("Engine", "OutputStream", "TokenLogprobs")
"""Classes that nobody makes by hand, so that it does not matter how they are made."""


PYTHON = (
    Part(
        "LLM",
        "framework/engine/llm.py",
        ("LLM.generate", "LLM.chat", "LLM.expert_counts", "LLM.reconfigure", "LLM.close"),
    ),
    Part("Streams", "framework/engine/stream.py", ("OutputStream",)),
    Part("AsyncLLM", "framework/engine/aio.py", ("AsyncLLM",)),
    Part(
        "Parameters",
        "framework/request.py",
        ("SamplingParams", "OutputKind", "StructuredOutputsParams", "PoolingParams"),
    ),
    Part(
        "Outputs",
        "framework/request.py",
        ("RequestOutput", "CompletionOutput", "RequestMetrics", "Logprob", "TokenLogprobs.view"),
    ),
    Part(
        "The engine, a step at a time",
        "framework/engine/engine.py",
        ("Engine.add_request", "Engine.step", "Engine.has_unfinished_requests", "Engine.abort", "Engine.stats"),
    ),
    Part("Errors", "framework/errors.py", ()),
    Part("Configurations", "framework/config.py", ()),
    Part("Version of the contracts", "framework/__init__.py", ("API_VERSION",)),
)
CONTRACTS = (
    Part("Announcing", "framework/plugins.py", ("ComponentSpec", "FrameworkHooks")),
    Part("Contracts", "framework/interfaces.py", ()),
    Part("What travels", "framework/batch.py", ()),
    Part("Requests", "framework/request.py", ("Request", "RequestStatus", "NewTokens")),
)
TESTING = (
    Part("Models with known logits", "framework/testing/crafted.py", ()),
    Part("Checks", "framework/testing/checking.py", ()),
    Part("Sampler stages", "framework/testing/stages.py", ()),
    Part("Sampler stages over whole requests", "framework/testing/stage_courses.py", ()),
    Part("Cases, contexts and rows of stages", "framework/testing/stage_bench.py", ()),
    Part("Sampler stages in engines", "framework/testing/stage_engine.py", ()),
    Part("Schedulers", "framework/testing/schedulers.py", ()),
    Part("Policies", "framework/testing/policies.py", ()),
    Part("Attention plugins", "framework/testing/attention_plugin.py", ()),
    Part("Attention", "framework/testing/attention_suite.py", ()),
    Part("Models", "framework/testing/models.py", ()),
    Part("Models in engines", "framework/testing/model_engine.py", ()),
    Part("Cases of models, and their weights", "framework/testing/model_bench.py", ()),
    Part("Shapes of attention steps", "framework/testing/attention.py", ()),
    Part("KV connectors", "framework/testing/connector.py", ()),
    Part("Grammars", "framework/testing/grammars.py", ()),
    Part("Loaders", "framework/testing/loaders.py", ()),
    Part("Cases of backends", "framework/testing/backend_case.py", ()),
    Part("Backends", "framework/testing/backends.py", ()),
    Part("Faults of a KV connector", "framework/testing/fault_options.py", ()),
)


OPEN = (
    "interfaces.py", "plugins.py", "batch.py", "request.py", "errors.py", "nulls.py", "rng.py", "step_ops.py",
    "scheduler/__init__.py", "layers/*.py", "sampling/draw.py", "sampling/groups.py", "sampling/history.py",
    "sampling/interval.py",
)  # fmt: skip
"""Modules of the core that a plugin may import: `docs/public-names.md` says what that means."""
SUITES = (
    "checking", "crafted", "stages", "schedulers", "policies", "attention_suite", "connector", "grammars", "loaders",
    "observers", "backends", "models", "model_bench", "fault_options",
)  # fmt: skip
"""Modules of framework.testing that a plugin's tests may import. Single checks come and go; the suites stay."""


def pages() -> dict[Path, str]:
    """{path: its text}."""
    folder = ROOT / "docs" / "api"
    return {
        folder / "python.md": _page("Python", "What `from framework import ...` gives, and what it hands out.", PYTHON),
        folder / "configuration.md": "\n\n".join(["# Reference: configuration keys", GENERATED, *_configuration()])
        + "\n",
        folder / "contracts.md": _page(
            "contracts", "What a plugin of each kind must do, and what it may use.", CONTRACTS
        ),
        folder / "testing.md": _page("testing", "What a plugin's own tests may use.", TESTING),
        folder / "names.md": "\n\n".join(
            [
                "# Reference: public names",
                f"What may change, and when, is in [public-names.md](../public-names.md). {GENERATED}",
                *_open_names(),
            ]
        )
        + "\n",
    }


def _page(title: str, sentence: str, parts: Sequence[Part]) -> str:
    blocks = [f"# Reference: {title}", f"{sentence} {GENERATED}"]
    for part in parts:
        blocks += [f"## {part.heading}", *_Source(part.file).blocks(part.names)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _open_names() -> Iterator[str]:
    head = ("module", "names")
    yield "## For programs\n\n" + _table(head, [("`framework`", _words(_Source("framework/__init__.py").listed()))])
    paths = [path for pattern in OPEN for path in sorted((ROOT / "framework").glob(pattern))]
    yield "## For plugins\n\n" + _table(head, list(_rows_of_names(paths)))
    paths = [ROOT / "framework" / "testing" / f"{name}.py" for name in SUITES]
    yield "## For the tests of plugins\n\n" + _table(head, list(_rows_of_names(paths)))
    hooks = [name for name in _Source("framework/plugins.py").methods("FrameworkHooks") if not name.startswith("_")]
    groups = "of the entry-point group `framework.plugins`; the group `framework.conf` names folders of YAML"
    yield f"## Hooks\n\n{_words(hooks)}, in modules {groups}."


def _rows_of_names(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        file = path.relative_to(ROOT).as_posix()
        source = _Source(file)
        names = source.listed() or source.public()
        if path.parent.name == "testing":
            whole = [name for name in names if name.startswith("check_")][-1:]
            names = [name for name in names if not name.startswith("check_") and name.isupper() <= (name == "CHECKS")]
            names += whole
        if names:
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield f"`{module}`", _words(names)


def _words(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -------------------------------------------------------------------------------------------------- Python sources


class _Source:
    """One file: its top-level definitions by name, with the words that its private aliases stand for."""

    def __init__(self, file: str) -> None:
        text = (ROOT / file).read_text(encoding="utf-8")
        self._file, self._lines, tree = file, text.splitlines(), ast.parse(text)
        self._nodes = {name: (node, after) for node, after in _pairs(tree.body) for name in _names(node)}
        self._module = ast.get_docstring(tree) or ""

    def public(self) -> list[str]:
        """Names that are defined here for others."""
        return [name for name in self._nodes if not name.startswith("_")]

    def listed(self) -> list[str]:
        """The names of `__all__`, none without one."""
        node = self._nodes.get("__all__", (None, ""))[0]
        return list(ast.literal_eval(node.value)) if isinstance(node, ast.Assign) else []

    def methods(self, name: str) -> list[str]:
        node = self._nodes[name][0]
        return [one.name for one in getattr(node, "body", ()) if isinstance(one, ast.FunctionDef)]

    def blocks(self, names: Sequence[str]) -> list[str]:
        """Markdown of the names; without names of every public definition, below the file's docstring."""
        if names:
            chosen: dict[str, list[str]] = {}
            for name in names:
                owner, _, method = name.partition(".")
                chosen.setdefault(owner, []).extend([method] if method else [])
            return [block for owner, methods in chosen.items() for block in self._definition(owner, methods)]
        found = [f"`{self._file}`: {markdown(self._module)}"]
        for name, (node, _) in self._nodes.items():
            if not name.startswith("_") and isinstance(node, ast.ClassDef | ast.FunctionDef):
                found += [*self._section(node), *self._definition(name, ())]
        return found

    def _section(self, node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
        """The heading of the section that begins right above the definition, if one does."""
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        above = [line for line in self._lines[max(0, first - 8) : first - 1] if line]
        for line in reversed(above):
            if section := SECTION.fullmatch(line):
                yield f"## {section[1].capitalize()}"
            if not line.startswith(("#", "StageKind")):
                return

    def _definition(self, name: str, methods: Sequence[str]) -> Iterator[str]:
        node, after = self._nodes[name]
        yield f"### {name}"
        if isinstance(node, ast.ClassDef):
            yield from self._class(node, methods)
        elif isinstance(node, ast.FunctionDef):
            yield _code(f"def {self._signature(node, 0)}")
            yield markdown(ast.get_docstring(node) or "")
        else:
            yield _code(ast.unparse(node))
            yield markdown(after)

    def _class(self, node: ast.ClassDef, methods: Sequence[str]) -> Iterator[str]:
        bases = ", ".join(b for b in map(ast.unparse, node.bases) if not b.startswith(("_", "Iterator", "Sequence")))
        made = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
        head = f"class {self._signature(made[0])}" if made and not bases else f"class {node.name}({bases})"
        head = f"class {node.name}" if node.name in HANDED_OUT else head
        head = head.replace("__init__", node.name).removesuffix("()").removesuffix(" -> None")
        fields = self._fields(node)
        yield _code("\n".join([f"{head}:", *fields]) if fields else head)
        if doc := ast.get_docstring(node):
            yield markdown(doc)
        items = [self._method(m) for m in node.body if self._is_shown(m, methods)]
        if items:
            yield "\n".join(items)

    def _fields(self, node: ast.ClassDef) -> list[str]:
        """The lines of public fields and members as they stand there, with their comments."""
        if any("Exception" in ast.unparse(b) or "Error" in ast.unparse(b) for b in node.bases):
            return []
        found = []
        for one in node.body:
            if isinstance(one, ast.AnnAssign | ast.Assign) and not any(n.startswith("_") for n in _names(one)):
                found += self._lines[one.lineno - 1 : one.end_lineno]
        return found

    def _is_shown(self, node: ast.stmt, methods: Sequence[str]) -> bool:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or "overload" in _decorators(node):
            return False
        return node.name in methods if methods else not node.name.startswith("_")

    def _method(self, node: ast.stmt) -> str:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), "only methods are shown"
        returns = f": {ast.unparse(node.returns)}" if node.returns is not None else ""
        word = f"{node.name}{returns}" if "property" in _decorators(node) else self._signature(node)
        word = f"async {word}" if isinstance(node, ast.AsyncFunctionDef) else word
        doc = markdown(ast.get_docstring(node) or "")
        text = f"- `{word}`" + (f"\n\n{doc}" if doc else "")
        return "\n".join(f"  {line}" if line and n else line for n, line in enumerate(text.split("\n")))

    def _signature(self, node: ast.FunctionDef | ast.AsyncFunctionDef, num_own: int = 1) -> str:
        """num_own: arguments that nobody writes: self or cls."""
        arguments = self._with_aliases(", ".join(list(_arguments(node.args))[num_own:]))
        returns = "" if node.returns is None else f" -> {self._with_aliases(ast.unparse(node.returns))}"
        return f"{node.name}({arguments}){returns}"

    def _with_aliases(self, text: str) -> str:
        for name in re.findall(r"\b_[A-Z]\w*", text):
            if name in self._nodes and isinstance(alias := self._nodes[name][0], ast.Assign):
                text = re.sub(rf"\b{name}\b", ast.unparse(alias.value), text)
        return text


def _pairs(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, the text right behind it, as constants have it)."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        yield node, str(after.value.value) if is_text else ""  # type: ignore[union-attr]  # it is one, by is_text


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _arguments(args: ast.arguments) -> Iterator[str]:
    """Each argument as it is written by hand."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    for argument, default in zip(plain, defaults, strict=True):
        yield _argument(argument, default)
    if args.vararg is not None or args.kwonlyargs:
        yield "*" if args.vararg is None else f"*{ast.unparse(args.vararg)}"
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _argument(argument, default)
    if args.kwarg is not None:
        yield f"**{ast.unparse(args.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation is not None else "="
    return ast.unparse(argument) + (f"{equals}{ast.unparse(default)}" if default is not None else "")


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(d) for d in node.decorator_list]


def _code(text: str) -> str:
    """A block of source; one long line is broken behind its commas, where brackets do not hold them together."""
    if len(text) > LINE and "\n" not in text:
        text = re.sub(r", (?![^\[{]*[\]}])", ",\n    ", text)
    return f"```py\n{text}\n```"


def markdown(doc: str) -> str:
    """A docstring as Markdown: columns of names and meanings become lists, everything else stays as it is."""
    out: list[str] = []
    for line in doc.split("\n"):
        column = COLUMN.fullmatch(line)
        if column is not None:
            if out and out[-1] and not out[-1].startswith("- "):
                out.append("")
            out.append(f"- `{column['names']}`: {_text(column['text'])}")
        elif line.startswith(" ") and out and out[-1].startswith("- "):
            out[-1] += f" {_text(line.strip())}"
        else:
            if line and out and out[-1].startswith("- "):
                out.append("")
            out.append(_text(line))
    return "\n".join(out)


def _text(line: str) -> str:
    """Signs that Markdown would read are kept as they are, outside of `code`."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"([*\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


# ------------------------------------------------------------------------------------------------ YAML files


def _configuration() -> Iterator[str]:
    yield (
        "Words of the command line and of `LLM(overrides=[...])`; how they are written, and which value wins, is in"
        " [configuration.md](../configuration.md)."
    )
    yield "## Keys"
    yield _table(("key", "default", "meaning"), _primary_keys())
    for group in sorted({path.parent for path in _group_files()}):
        yield from _group(group.relative_to(ROOT / "conf").as_posix(), sorted(group.glob("*.yaml")))


def _group_files() -> list[Path]:
    return [path for path in (ROOT / "conf").rglob("*/*.yaml") if "hydra" not in path.parts]


def _group(name: str, files: Sequence[Path]) -> Iterator[str]:
    yield f"## Group `{name}`"
    yield _table(("choice", "what it is"), [(f"`{name}={file.stem}`", _about(file)) for file in files])
    rows: dict[tuple[str, str, str], list[str]] = {}
    for file in files:
        for key, value, meaning in _keys(file):
            if key not in ("name", "defaults") and name != "sampler/stage":
                rows.setdefault((f"`{name}.{key}`", f"`{value}`", meaning), []).append(file.stem)
    if rows:
        whose = [(*row, "all" if len(of) == len(files) else ", ".join(of)) for row, of in rows.items()]
        yield _table(("key", "default", "meaning", "of"), whose)


def _about(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if not line.startswith("# @"))
    values = {key: value for key, value, _ in _keys(file)}
    stages = re.findall(r"stage/(\w+)", values.get("defaults", ""))
    more = f": {', '.join(stages)}" if stages else f" (order {values['order']})" if "order" in values else ""
    return first.lstrip("# ") + more


def _primary_keys() -> Iterator[tuple[str, str, str]]:
    """Rows of conf/config.yaml, without its list of groups and Hydra's part; the parameters of requests are one row."""
    parameters = []
    for key, value, meaning in _keys(ROOT / "conf" / "config.yaml"):
        if key.startswith("sampler.") and not meaning:
            parameters.append(f"`{key.removeprefix('sampler.')}`")
        elif not key.startswith(("defaults", "hydra")):
            yield f"`{key}`", f"`{value}`", meaning
    what = (
        "defaults of requests that bring no [`SamplingParams`](python.md#samplingparams); null = not set. PARAMETER is"
    )
    yield "`sampler.PARAMETER`", "`null`", f"{what} {', '.join(parameters)}"


def _keys(file: Path) -> list[tuple[str, str, str]]:
    """(dotted key, default, meaning) of each value of a YAML file of ours: two spaces a level, one key a line."""
    found, nodes = [], list[str]()
    for line in file.read_text(encoding="utf-8").splitlines():
        key = KEY.fullmatch(line)
        if key is None:
            continue
        nodes = [*nodes[: len(key["indent"]) // 2], key["name"]]
        if key["value"]:
            found.append((".".join(nodes), key["value"], key["meaning"] or ""))
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
