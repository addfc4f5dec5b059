"""Images, services and clusters are not built in tests; that what their files name exists is checked."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import bootstrap.cli
import peer.cli
from peer.protocol.address import PEER_EXAMPLE
from peer.settings import load_settings, setting_overrides

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
SERVICES = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
PARSERS = {"atoll": peer.cli.build_parser, "atoll-bootstrap": bootstrap.cli.build_parser}


def interpolate(text: str) -> str:
    """`${NAME:-default}` as compose reads it with nothing set; an empty default stands for a peer address."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", lambda match: match[1] or PEER_EXAMPLE, text)


RENTED = ROOT / "deploy/rented.sh"
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def parser_of(service: dict) -> ArgumentParser:
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)
    (program,) = json.loads(entry)
    return PARSERS[program]()


@pytest.mark.parametrize("name", SERVICES)
def test_every_command_is_one_that_the_program_accepts(name):
    command = [interpolate(part) for part in SERVICES[name]["command"]]
    arguments = vars(parser_of(SERVICES[name]).parse_args(command))
    assert "/data" in map(str, arguments.values())
    load_settings({}, None, SERVICES[name].get("environment", {}))


def test_the_manifest_that_the_bootstrap_serves_is_in_the_image():
    manifest = SERVICES["bootstrap"]["command"][0]
    assert manifest.startswith("configs/")
    assert (ROOT / manifest).is_file()


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_every_copied_path_exists_and_reaches_the_build(file):
    lines = re.findall(r"^COPY (?!--from=)(.*) \S+$", file.read_text(), re.MULTILINE)
    copied = [part for line in lines for part in line.split()]
    assert {"setup.cfg", "constraints.txt", "peer", "bootstrap", "configs"} <= set(copied)
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert [path for path in copied if not (ROOT / path).exists() or path not in let_through] == []


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_no_image_runs_as_root(file):
    """A number, as Kubernetes wants it where `runAsNonRoot` is set."""
    assert re.findall(r"^USER (\S+)$", file.read_text(), re.MULTILINE) == ["1000:1000"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_has_no_compiler_and_says_whether_it_is_well(file):
    """What is built with a compiler comes from an earlier stage as a wheel; the checks of health are valid Python."""
    build, final = re.split(r"^FROM .*$", file.read_text(), flags=re.MULTILINE)[1:]
    assert "gcc" in build
    assert "gcc" not in final
    assert "--mount=type=bind,from=build,source=/wheels" in final
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n    CMD (.*)$", final, re.MULTILINE)
    program, flag, code = json.loads(check)
    assert (program, flag) == ("python", "-c")
    compile(code, file.name, "exec")
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', final, re.MULTILINE)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert f"\n{entry} = " in config["options.entry_points"]["console_scripts"]


def test_the_dashboard_of_the_compose_file_reads_the_page_of_its_bootstrap():
    assert SERVICES["peer"]["deploy"]["replicas"] == 3
    written = {name: yaml.safe_load(config["content"]) for name, config in COMPOSE["configs"].items()}
    (job,) = written["prometheus"]["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    command = SERVICES[host]["command"]
    assert command[command.index("--http") + 1] == f"0.0.0.0:{port}"
    (source,) = written["datasource"]["datasources"]
    assert source["url"].split("/")[2].split(":")[0] in COMPOSE["services"]
    grafana = COMPOSE["services"]["grafana"]
    folder, target, _ = grafana["volumes"][0].split(":")
    assert target == written["dashboards"]["providers"][0]["options"]["path"]
    assert json.loads((ROOT / "docker" / folder / "atoll-run.json").resolve().read_text())["panels"]
    assert {config["source"] for service in COMPOSE["services"].values() for config in service.get("configs", ())} == (
        written.keys()
    )


def started(file: Path) -> list[list[str]]:
    """The command lines of ours that a file of `deploy` starts, with an address in the place of a variable."""
    text = file.read_text()
    if file.suffix == ".yaml":
        container = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]
        found = [[{"bootstrap": "atoll-bootstrap", "peer": "atoll"}[container["name"]], *container["args"]]]
    else:
        whole = text.replace("\\\n", " ")
        found = [shlex.split(line) for line in re.findall(r"^(?:ExecStart=/opt/atoll/bin/|exec )(.*)$", whole, re.M)]
    return [[re.sub(r"\$[({]?ADDRESS[)}]?", PEER_EXAMPLE, word) for word in words] for words in found]


# the dashboard of deploy/grafana starts nothing
@pytest.mark.parametrize("file", [*sorted((ROOT / "deploy").glob("[!g]*/*.*")), RENTED], ids=str)
def test_what_is_deployed_is_a_command_that_the_program_accepts(file):
    ((program, *arguments),) = started(file)
    parsed = PARSERS[program]().parse_args(arguments)
    if program == "atoll":
        load_settings(setting_overrides(parsed), None, {})


def ended_within(service: dict) -> int:
    """Seconds that compose gives a service to stop."""
    number, unit = re.fullmatch(r"(\d+)([sm])", service["stop_grace_period"]).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def stops() -> Iterator[tuple[str, list[str], int]]:
    """(where, command, seconds to stop) of all that is started as a service."""
    for name, service in SERVICES.items():
        yield f"compose {name}", [interpolate(part) for part in service["command"]], ended_within(service)
    for file in (ROOT / "deploy/kubernetes").iterdir():
        pod = yaml.safe_load(file.read_text())["spec"]["template"]["spec"]
        yield file.name, pod["containers"][0]["args"], pod["terminationGracePeriodSeconds"]
    for file in (ROOT / "deploy/systemd").iterdir():
        unit = dict(re.findall(r"^(\w+)=(.*)$", file.read_text(), re.M))
        assert unit["KillMode"] == "mixed"  # a libp2p daemon that gets SIGTERM ends before the last round
        yield file.name, started(file)[0], int(unit["TimeoutStopSec"])


def test_a_peer_that_is_stopped_has_time_to_drain_and_save_and_a_bootstrap_keeps_the_run():
    services = list(stops())
    assert len(services) == 6
    for where, command, seconds in services:
        if "--drain-s" in command:
            assert seconds >= float(command[command.index("--drain-s") + 1]) + 120, where
        else:
            assert {"--archive", "--http"} <= set(command), where
            assert seconds >= 30, where


def test_the_templates_of_providers_start_what_the_script_starts():
    script = RENTED.read_text().replace("\\\n    ", "").split("set -euo pipefail\n")[1]
    steps = [line for line in script.splitlines() if not line.startswith("#")]
    runpod, vast = (json.loads((ROOT / f"deploy/{name}.json").read_text()) for name in ("runpod", "vast"))
    assert runpod["dockerStartCmd"] == ["\n".join(steps)]
    assert vast["onstart"].splitlines() == ["set -euo pipefail", *steps]
    assert runpod["ports"] == ["31337/tcp", "31338/tcp"]
    variables = [word for word in shlex.split(vast["env"]) if "=" in word]
    assert dict(word.split("=", 1) for word in variables) == runpod["env"]
    load_settings({}, None, runpod["env"])  # none of them is taken for a setting of the peer


def test_wheels_are_for_each_python_that_is_supported_and_both_processors():
    with (ROOT / "pyproject.toml").open("rb") as file:
        wheels = tomllib.load(file)["tool"]["cibuildwheel"]
    assert wheels["build"].split() == ["cp311-*", "cp312-*", "cp313-*"]
    assert wheels["linux"]["archs"] == ["x86_64", "aarch64"]
    assert "python_requires = >=3.11,<3.14" in (ROOT / "setup.cfg").read_text()


def test_every_file_that_names_a_version_names_that_of_setup_cfg():
    (version,) = re.findall(r"^version = (.+)$", (ROOT / "setup.cfg").read_text(), re.M)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    images = [tag for file in (ROOT / "deploy/kubernetes").iterdir()
              for tag in re.findall(r"image: atoll-\w+:(\S+)", file.read_text())]  # fmt: skip
    assert images == [version] * 2
