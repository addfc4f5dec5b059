"""Parts of a recipe act through their interface, and a process resolves its manifest once: read from the code."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.outer.recipe.recipe import PARTS

ROOT = Path(__file__).parents[3]
COMPOSES = ROOT / "peer" / "outer" / "recipe"
KINDS = {part.__name__ for words in PARTS.values() for part in words.values()} | {"GatherFormat", "ReduceFormat"}
RESOLVES = {"RunPlan.of", "swarm_recipe", "resolve"}
# Each is where one kind of process learns of its run: the agent, readers of a swarm, the trainer, a check of the
# machine before there is one, a rank, a command on a checkpoint.
RESOLVED = {
    "swarm/agent/session.py", "swarm/observe/reader.py", "swarm/observe/chain_reader.py", "run/assemble.py",
    "run/device_checks.py", "run/follower.py", "run/task_scores.py", "use/trained.py", "use/upload_state.py",
}  # fmt: skip


def asked(source: str) -> list[str]:
    """Where a module asks which part something is, unless it defines that part: `line: part`."""
    nodes = list(ast.walk(ast.parse(source)))
    kinds = KINDS - {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    return [f"{line}: {name}" for node in nodes for line, name in _asked(node) if name in kinds]


def _asked(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
        yield from ((node.lineno, name) for name in _names(node.args[1]))
    elif isinstance(node, ast.Compare):
        yield from ((node.lineno, name) for side in (node.left, *node.comparators) for name in _names(side))
    elif isinstance(node, ast.MatchClass):
        yield from ((node.lineno, name) for name in _names(node.cls))


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def sources(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def test_no_file_but_those_that_compose_recipes_asks_which_part_one_has() -> None:
    found = {
        str(path.relative_to(ROOT)): problems
        for path in sources("peer", "bootstrap", "benchmarks", "atoll")
        if COMPOSES not in path.parents and (problems := asked(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize("line", [
    "isinstance(recipe.schedule, Every | Strided)", "isinstance(part, (Carry, Mix))", "recipe.allocator == EvenSplit()",
    "type(recipe.topology) is AllPeers", "match wire:\n    case GatherFormat():\n        pass",
])  # fmt: skip
def test_a_question_for_the_part_is_found(line: str) -> None:
    assert asked(line)


def test_a_process_resolves_its_manifest_once() -> None:
    calls = Counter(
        str(path.relative_to(ROOT / "peer"))
        for path in sources("peer/swarm", "peer/link", "peer/run", "peer/train", "peer/use")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in RESOLVES
    )
    assert calls == dict.fromkeys(RESOLVED, 1)
