"""The modules and the rooms of peer import each other in one direction, types and late imports included."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Graph = dict[str, set[str]]


def sources() -> dict[str, str]:
    """Module -> its text, packages included."""
    found = {}
    for path in (ROOT / "peer").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports_of(text: str, modules: Iterable[str]) -> Iterator[str]:
    """Those of `modules` that a module imports anywhere: at its top, for types alone, or within a function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                names = (f"{node.module}.{alias.name}", str(node.module))
                yield from [name for name in names if name in modules][:1]


@cache
def graph_of_peer() -> Graph:
    return graph_of(sources())


def graph_of(texts: Mapping[str, str]) -> Graph:
    return {module: set(imports_of(text, texts)) - {module} for module, text in texts.items()}


def circle_in(graph: Graph) -> list[str]:
    """The modules of one circle in their order, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def layer_contracts() -> dict[str, list[str]]:
    """Contract of pyproject.toml -> its rooms by their full names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rooms = {}
    for contract in contracts:
        if contract["type"] == "layers":
            names = [name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")]
            within = [f"{container}." for container in contract.get("containers", ())]
            rooms[contract["id"]] = [f"{prefix}{name}" for prefix in within or [""] for name in names]
    return rooms


def room_of(module: str, rooms: Iterable[str]) -> str | None:
    """The innermost room that a module lies in."""
    return max((room for room in rooms if f"{module}.".startswith(f"{room}.")), key=len, default=None)


def between_rooms(graph: Graph, rooms: Iterable[str]) -> Graph:
    found: Graph = {}
    for module, imported in graph.items():
        if (room := room_of(module, rooms)) is not None:
            others = {other for target in imported if (other := room_of(target, rooms)) is not None}
            found.setdefault(room, set()).update(others - {room})
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = graph_of_peer()
    assert len(graph) > 150
    assert circle_in(graph) == []


@pytest.mark.parametrize("contract", layer_contracts())
def test_no_room_imports_itself_by_way_of_others(contract: str) -> None:
    graph = between_rooms(graph_of_peer(), layer_contracts()[contract])
    assert sum(map(len, graph.values())) >= 3
    assert circle_in(graph) == []


def test_every_module_has_a_floor() -> None:
    floors = layer_contracts()["floors"]
    packages = {module for module, text in sources().items() if not text}
    assert [module for module in sources() if module not in packages and room_of(module, floors) is None] == []


@pytest.mark.parametrize(
    "late",
    ["from peer import one", "import peer.one", "if TYPE_CHECKING:\n    from peer.one import One",
     "def late():\n    from peer.one import One"],
)  # fmt: skip
def test_a_circle_is_found_wherever_it_closes(late: str) -> None:
    texts = {"peer": "", "peer.one": "from peer.two import Two", "peer.two": late, "peer.three": "import peer.one"}
    assert set(circle_in(graph_of(texts))) == {"peer.one", "peer.two"}
    assert circle_in(graph_of({**texts, "peer.two": ""})) == []
    rooms = between_rooms({"peer.a.x": {"peer.b.y"}, "peer.b.z": {"peer.a.w"}, "peer.c": set()}, ["peer.a", "peer.b"])
    assert set(circle_in(rooms)) == {"peer.a", "peer.b"}
