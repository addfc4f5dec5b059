"""Nothing that the network or a file can say is ever executed: the calls that could do it appear nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "pty", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "os.system", "os.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load", "yaml.load_all", "yaml.full_load",
    "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "pandas.read_pickle", "numpy.load",
}
MUST_BE_FALSE = {"trust_remote_code", "shell", "allow_pickle"}


def violations(source: str) -> list[str]:
    """Every forbidden construct of a module, as `line: what`."""
    tree = ast.parse(source)
    aliases = {name: target for node in ast.walk(tree) for name, target in _imported_names(node)}
    return [f"{line}: {what}" for node in ast.walk(tree) for line, what in _problems(node, aliases)]


def _imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _problems(node: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] in MODULES:
                yield node.lineno, f"import {alias.name}"
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in MODULES:
        yield node.lineno, f"from {node.module} import"
    elif isinstance(node, ast.Attribute | ast.Name):
        name = _dotted_name(node, aliases)
        if name in CALLS or (isinstance(node, ast.Name) and name in BUILTINS):
            yield node.lineno, name
    elif isinstance(node, ast.keyword) and node.arg in MUST_BE_FALSE and not _is_false(node.value):
        yield node.value.lineno, f"{node.arg}="
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in MUST_BE_FALSE and not _is_false(value):
                yield node.lineno, f"{key.value}:"


def _dotted_name(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("source", [
    "import pickle",
    "from dill import loads",
    "import torch\ntorch.load(path)",
    "import torch as t\nt.load(path)",
    "from torch import load as read\nread(path)",
    "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
    "from yaml import unsafe_load\nunsafe_load(text)",
    "import os\nos.system(command)",
    "loader = torch.load",
    "import numpy as np\nnp.load(path)",
    "eval(text)",
    "exec(text)",
    "run = eval",
    "subprocess.run(command, shell=True)",
    "subprocess.run(command, shell=flag)",
    "AutoModel.from_pretrained(name, trust_remote_code=True)",
    "AutoModel.from_pretrained(name, trust_remote_code=settings.trust)",
    "options = {'trust_remote_code': True}",
])
def test_each_unsafe_construct_is_found(source):
    assert len(violations(source)) == 1


@pytest.mark.parametrize("source", [
    "model.eval()",
    "yaml.safe_load(text)",
    "state.load(path)",
    "import re\nre.compile(pattern)",
    "torch.compile(model)",
    "AutoModel.from_pretrained(name, trust_remote_code=False)",
    "options = {'trust_remote_code': False, **more}",
])
def test_safe_neighbours_are_let_through(source):
    assert violations(source) == []


def test_nothing_unsafe_is_in_the_program():
    files = sorted(file for room in ("atoll", "peer", "bootstrap", "examples") for file in (ROOT / room).rglob("*.py"))
    assert len(files) > 5
    found = [f"{file.relative_to(ROOT)}:{problem}" for file in files for problem in violations(file.read_text())]
    assert found == []
