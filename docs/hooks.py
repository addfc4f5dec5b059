"""Pages of the site that are made from the code, and the files of the root that are pages, too."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
KINDS = {"dict": "word or mapping", "int": "whole number", "float": "number", "bool": "yes or no", "str": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them; mkdocs calls this before it renders."""
    pages = {page: rebased((ROOT / source).read_text()) for page, source in ROOT_PAGES.items()}
    pages |= {"reference/cli.md": cli(), "reference/settings.md": settings(), "reference/manifest.md": manifest()}
    pages |= {f"recipes/{path.stem}.md": recipe(path) for path in (ROOT / "docs" / "recipes").glob("*.py")}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links into the code become plain text: the site has no code but the recipes'."""
    markdown = re.sub(r"\((recipes/[a-z0-9-]+)\.py\)", r"(\1.md)", markdown)
    return re.sub(r"\[([^\]]*)\]\(\.\./(?!results/|index)[^)\s]*\)", r"\1", markdown)


def recipe(path: Path) -> str:
    """A recipe as a function: the equations above it as text."""
    text = path.read_text(encoding="utf-8")
    module = ast.parse(text)
    code = "\n".join(text.splitlines()[module.body[0].end_lineno :]).strip()
    back = "" if path.stem == "common" else f"What it sends, when to use it: [{path.stem}](../recipes.md#{path.stem}). "
    shared = "" if path.stem == "common" else "Replicas and `common`: [common](common.md)."
    return f"# {path.stem}\n\n{ast.get_docstring(module)}\n\n```python\n{code}\n```\n\n{back}{shared}\n"


def rebased(text: str) -> str:
    """Links of a file in the root as they are from `docs`; links to what is no page become plain text."""
    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if re.match(r"https?:|#", target):
            return match[0]
        for page, source in ROOT_PAGES.items():
            if target.partition("#")[0] == source:
                return f"[{label}]({target.replace(source, page)})"
        return f"[{label}]({target.removeprefix('docs/')})" if target.startswith("docs/") else label

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text)


def cli() -> str:
    """The `--help` of every command."""
    import bootstrap.cli
    import peer.cli
    from bootstrap.organise import build_organiser_parser

    parts = ["# Commands\n"]
    organiser = build_organiser_parser()
    for parser in (peer.cli.build_parser(), bootstrap.cli.build_parser(), organiser):
        for name, one in _commands(parser):
            if name == "atoll-bootstrap" and one.description == organiser.description:
                continue  # its commands follow
            parts.append(f"## {name}\n\n```\n{_help(one)}```\n")
    return "\n".join(parts)


def _help(parser: argparse.ArgumentParser) -> str:
    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, width=110)

    parser.formatter_class = formatter  # type: ignore[assignment]  # argparse calls it with a name alone
    return parser.format_help()


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _commands(one)


def settings() -> str:
    """Every setting of a peer."""
    from peer.settings import env_name, flag_name, known_settings

    lines = [
        "# Settings", "",
        "What may differ between the peers of a run. Each is a flag of `atoll join`, a key in the YAML file of "
        f"`--config` (`save_steps`), and a variable of the environment (`{env_name('save_steps')}`); a flag wins "
        "over a variable, a variable over the file.", "",
        "| flag | default | |", "|---|---|---|",
    ]  # fmt: skip
    for name, field in known_settings().items():
        cells = (f"`{flag_name(name)}`", _default(field), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def manifest() -> str:
    """Every key of a run's manifest."""
    from peer.protocol import manifest as specs
    from peer.protocol.tokenizer_spec import TokenizerSpec

    sections: dict[str, Any] = {
        "": specs.RunManifest, "model": specs.ModelSpec, "tokenizer": TokenizerSpec, "data": specs.DataSpec,
        "data.sources": specs.SourceSpec, "inner": specs.InnerSpec, "recipe": specs.RecipeSpec,
        "rounds": specs.RoundSpec, "trust": specs.TrustSpec,
    }  # fmt: skip
    parts = [
        "# Manifest", "",
        "What must be equal on all peers of a run. The organiser writes YAML; the bootstrap signs it, and its digest "
        "is the run's id. `configs/runs/quickstart.yaml` is a complete example.", "",
    ]  # fmt: skip
    for name, spec in sections.items():
        about = re.sub(r"\n +", "\n", spec.__doc__ or "").strip()
        parts += [f"## {name or 'the whole'}", "", about, "", "| key | values | default |", "|---|---|---|"]
        for key, field in spec.model_fields.items():
            parts.append(f"| `{key}` | {_values(field)} | {_default(field)} |")
        parts.append("")
    return "\n".join(parts)


def _values(field: FieldInfo) -> str:
    limits = [
        f"{sign} {value:,}" if isinstance(value, int) else f"{sign} {value:g}"
        for one in field.metadata
        for sign, attribute in (("≥", "ge"), (">", "gt"), ("≤", "le"), ("<", "lt"))
        if (value := getattr(one, attribute, None)) is not None
    ]
    annotation = str(field.annotation)
    if annotation.startswith(("dict", "tuple", "<class 'peer.")):
        return "mapping" if annotation.startswith("dict") else "list" if annotation.startswith("tuple") else "a section"
    words = re.findall(r"'([^']+)'", annotation) if "Literal[" in annotation else []
    kinds = [told for kind, told in KINDS.items() if re.search(rf"\b{kind}\b", annotation)]
    shown = ", ".join(f"`{word}`" for word in words) or (kinds[0] if kinds else "a section")
    return " ".join([shown, ", ".join(limits)]).strip()


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default is None or default in ((), {}):
        return "unset"
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return "`" + " ".join(map(str, default)) + "`" if len(str(default)) < 60 else ""
    plain = isinstance(default, (int, float, str, Path)) and len(str(default)) < 60
    return f"`{default}`" if plain else ""
