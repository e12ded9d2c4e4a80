"""House rules that a machine can check: the import arrow, sizes, names, no print, no assert on what users pass."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "ioattn").rglob("*.py"))
TEXTS = SOURCES + sorted(path for name in ("tests", "examples") for path in (ROOT / name).rglob("*.py"))

# Device code is written for another compiler: its functions take tensors and strides one by one.
KERNEL_FOLDERS = ("triton", "gluon")
PUBLIC_OPERATIONS = {"attention", "attention_varlen", "attention_decode", "explain", "why"}
# A sub-command's options are its arguments.
PUBLIC_OPERATIONS |= {"predict", "count", "measure", "compare", "decode", "paged", "speculative", "flashconv"}

# Who may import whom, top to bottom; a folder may import what stands below it, and itself.
LAYERS = (
    {"cli"},
    {"integrations", "distributed", "bench"},
    {"__init__"},
    {"api"},
    {"cache_ops"},
    {"ops"},
    {"registry"},
    {"backends"},
    {"io"},
    {"assembler", "compose", "driver", "launching", "merge", "cases", "plans"},
    {"caches"},
    {"problem"},
    {"scores", "masks"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """The entry of LAYERS that a source file belongs to."""
    return path.relative_to(ROOT / "src" / "ioattn").with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[tuple[str, ...]]:
    """The dotted names inside ioattn that a file imports, also within functions, as tuples without `ioattn`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(a.name.split("."))[1:] for a in node.names if a.name.split(".")[0] == "ioattn")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively"
            parts = (node.module or "").split(".")
            if parts[0] == "ioattn":
                yield from ((*parts[1:], alias.name) for alias in node.names)


def functions_of(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def is_device_code(function: ast.FunctionDef) -> bool:
    """Whether a decorator hands the function to a kernel compiler."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_downward(path: Path) -> None:
    here = part_of(path)
    assert here in LEVEL, f"{here} has no place in the arrow: see CONTRIBUTING.md"
    for name in imports_of(path):
        target = name[0] if name and name[0] in LEVEL else "__init__"
        if target != here:
            assert LEVEL[here] < LEVEL[target], f"{relative(path)} imports ioattn.{'.'.join(name)}"


@pytest.mark.parametrize("path", [p for p in SOURCES if part_of(p) == "backends"], ids=relative)
def test_backends_do_not_import_each_other(path: Path) -> None:
    folder = path.relative_to(ROOT / "src" / "ioattn" / "backends").with_suffix("").parts[0]
    for name in imports_of(path):
        if name[0] == "backends" and len(name) > 1:
            assert name[1] == folder, f"{relative(path)} imports ioattn.{'.'.join(name)}"


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_files_have_at_most_500_lines_of_at_most_120_columns(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 500
    assert max(map(len, lines), default=0) <= 120


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_functions_are_short_and_take_few_arguments(path: Path) -> None:
    for function in functions_of(path):
        if function.name in PUBLIC_OPERATIONS:
            continue
        first = function.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        docstring = first.end_lineno - first.lineno + 1 if documented else 0
        length = function.end_lineno - function.lineno + 1 - docstring
        device = is_device_code(function)
        where = f"{relative(path)}:{function.lineno} {function.name}"
        assert length <= (80 if device else 40), f"{where} has {length} lines"
        given = function.args
        count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
        if not device and not any(folder in path.parts for folder in KERNEL_FOLDERS):
            assert count <= 8, f"{where} takes {count} arguments"


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_names_say_something(path: Path) -> None:
    banned = {"utils", "util", "common", "helpers", "helper", "misc", "v2", "new", "legacy"}
    words = {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")}
    assert not words & banned


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_print_and_no_environment(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and part_of(path) != "cli":
            assert ast.unparse(node.func) != "print", f"{relative(path)}:{node.lineno}"
        if isinstance(node, (ast.Attribute, ast.Name)):
            assert not re.fullmatch(r"os\.(environ|getenv)|getenv|environ", ast.unparse(node)), (
                f"{relative(path)}:{node.lineno} reads the environment"
            )


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_asserts_only_narrow_types(path: Path) -> None:
    """`python -O` drops asserts, so what a user passes is checked with `raise`; a type checker's hints may stay."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            assert re.fullmatch(r"\S+ is not None|isinstance\(.*\)", ast.unparse(node.test)), (
                f"{relative(path)}:{node.lineno}: {ast.unparse(node)}"
            )


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_comments_are_sentences_and_not_banners(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not re.match(r"\s*#\s*[-=#*]{3,}", line), f"{relative(path)}:{number} is a banner"
        assert not re.search(r"#.*\b(TODO|FIXME|XXX)\b(?!.*https?://)", line), f"{relative(path)}:{number} has no link"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_public_functions_are_documented(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node) or is_device_code(node), f"{relative(path)}:{node.lineno} {node.name}"


def test_public_operations_document_everything() -> None:
    tree = ast.parse((ROOT / "src" / "ioattn" / "api.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in PUBLIC_OPERATIONS:
            text = ast.get_docstring(node) or ""
            for section in ("Args:", "Returns:", "Raises:", "Example:"):
                assert section in text, f"{node.name} lacks {section}"
            for argument in (*node.args.args, *node.args.kwonlyargs):
                assert re.search(rf"\b{argument.arg}\b", text), f"{node.name} does not document {argument.arg}"
