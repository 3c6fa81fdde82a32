"""The files in docker/ and docs/docker.md against what they speak of. No image is built here, as that page says."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import dockerfile
import jsonschema
import pytest
import yaml

from backend_lib.cli.flags import ServerFlags
from backend_lib.cli.main import _parser, _split
from backend_lib.cli.server import find_server
from backend_lib.config import Settings
from backend_lib.router.metrics import FAMILIES
from tests.support.documents import ROOT, commands

DOCKER = ROOT / "docker"
PAGE = "docs/docker.md"
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()
COMMANDS = dockerfile.parse_file(str(DOCKER / "Dockerfile"))
COMPOSE = {path.name: yaml.safe_load(path.read_text()) for path in sorted(DOCKER.glob("compose*.yml"))}
SERVICES = {(file, name): each for file, parsed in COMPOSE.items() for name, each in parsed["services"].items()}
SERVERS = {key: each for key, each in SERVICES.items() if "build" in each}
TANDEM_PORTS = {each.name: each.port for each in ServerFlags().endpoints}


class Port(NamedTuple):
    """A port of a container that is published on the host."""

    address: str
    host: int
    container: int


def instructions(name: str) -> list[Any]:
    return [each for each in COMMANDS if each.cmd.upper() == name]


def environment() -> dict[str, str]:
    """The Dockerfile's ENV. The parser gives each variable as its name, its value and the "=" between them."""
    words = [word for each in instructions("ENV") for word in each.value if word != "="]
    return dict(zip(words[::2], words[1::2], strict=True))


def ports(service: dict[str, Any]) -> list[Port]:
    split = [each.split(":") for each in service.get("ports", [])]
    return [Port(address, int(host), int(container)) for address, host, container in split]


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Where things are mounted → what. A default in braces has a colon of its own."""
    matches = [re.fullmatch(r"(.*):(/[^:]+)(:ro)?", each) for each in service.get("volumes", [])]
    return {found[2]: found[1] for found in matches if found}


def plain(text: str) -> str:
    """With the defaults of variables, as Compose has it when none is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def given_commands() -> dict[str, list[str]]:
    """Every command that a file or the page gives a container."""
    found = {f"{file} {name}": [plain(word) for word in each["command"]] for (file, name), each in SERVERS.items()}
    found["Dockerfile"] = list(instructions("CMD")[0].value)
    for number, line in enumerate(commands(PAGE, "docker run")):
        words = shlex.split(line)
        if tail := words[words.index("tandem") + 1 :]:
            found[f"{PAGE} {number}"] = tail
    return found


@pytest.fixture(scope="module")
def tritonserver_flags() -> set[str]:
    """What a real tritonserver understands."""
    server = find_server()
    shown = subprocess.run([server.binary, "--help"], env=server.environment(), capture_output=True, text=True)
    return set(re.findall(r"--([a-z0-9-]+)", shown.stdout + shown.stderr))


def test_the_dockerfile_has_one_place_for_the_tag_and_ends_as_an_unprivileged_user():
    first, base = COMMANDS[:2]
    name, tag = first.value[0].split("=")
    assert re.fullmatch(r"\d\d\.\d\d-py3", tag)
    assert base.value[0] == f"nvcr.io/nvidia/tritonserver:${{{name}}}"
    assert len(instructions("FROM")) == 1
    assert instructions("USER")[-1].value == ("1000:1000",)


@pytest.mark.parametrize("each", instructions("COPY"), ids=lambda each: each.original)
def test_what_is_copied_exists_and_reaches_the_build(each):
    assert IGNORED[1] == "*"
    for source in each.value[:-1]:
        assert (ROOT / source).exists()
        assert f"!{source}" in IGNORED


def test_the_whole_package_is_copied_and_nothing_else_reaches_the_build():
    copied = {source for each in instructions("COPY") for source in each.value[:-1]}
    packages = {each.parent.name for each in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages | {"pyproject.toml", "README.md", "model_repository"} == copied
    assert {each.removeprefix("!") for each in IGNORED if each.startswith("!")} == copied


def test_the_image_has_the_dependencies_and_the_model_of_the_checkout():
    tomllib = pytest.importorskip("tomllib")
    run = next(each for each in instructions("RUN") if "tomllib" in each.value[0])
    script = re.search(r'python -c "(.*?)"', run.value[0], re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert done.stdout.splitlines() == pinned
    argument = next(each.value[0] for each in instructions("ARG") if each.value[0].startswith("BUILTIN_MODEL="))
    assert argument.replace("=", " := ", 1) in (ROOT / "Makefile").read_text().splitlines()


def test_the_build_ends_when_the_python_backend_embeds_another_python(tmp_path):
    check = next(each for each in instructions("RUN") if "stub_problem" in each.value[0]).value[0]
    script = shlex.split(check)[2]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env).returncode == 0
    other = script.replace("find_server()", "find_server(__import__('pathlib').Path('/bin/true'))")
    done = subprocess.run([sys.executable, "-c", other], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "there is none for Python" in done.stderr


def test_the_health_check_asks_the_http_port_and_waits_for_slow_loading():
    check = instructions("HEALTHCHECK")[0]
    kind, *words = check.value
    assert kind == "CMD" and words[0] == "curl" and "-fsS" in words
    assert words[-1] == f"http://127.0.0.1:{TANDEM_PORTS['http']}/v2/health/ready"
    periods = dict(flag.removeprefix("--").split("=") for flag in check.flags)
    assert periods["start-period"] == "60m" and periods["start-interval"] == "2s"


def test_every_door_is_exposed():
    assert {int(each) for each in instructions("EXPOSE")[0].value} == set(TANDEM_PORTS.values())


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_is_one_by_the_specification(name):
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor"
    jsonschema.validate(COMPOSE[name], json.loads((schemas / "compose-spec.json").read_text()))


@pytest.mark.parametrize("where", given_commands())
def test_a_command_is_one_that_tandem_and_tritonserver_understand(where, tritonserver_flags):
    program, *arguments = given_commands()[where]
    assert program in ("tandem", "tritonserver")
    own, flags = _split(arguments) if program == "tandem" else ([], arguments)
    assert {flag.removeprefix("--").partition("=")[0] for flag in flags} <= tritonserver_flags
    if program == "tritonserver":
        return
    parsed = _parser().parse_args(own)
    Settings.from_parameters(dict(each.split("=", 1) for each in parsed.set))
    if parsed.command == "serve":
        # Inside a container 127.0.0.1 is the container's own.
        assert {(each.port, each.address) for each in ServerFlags(tuple(flags)).endpoints} == {
            (port, "0.0.0.0") for port in TANDEM_PORTS.values()
        }


@pytest.mark.parametrize("key", SERVERS, ids=" ".join)
def test_a_server_publishes_its_doors_to_this_machine_only_and_has_time_to_end(key):
    service = SERVERS[key]
    assert sorted(each.container for each in ports(service)) == sorted(TANDEM_PORTS.values())
    assert {each.address for each in ports(service)} == {"127.0.0.1"}
    # `tandem serve` kills its server five seconds after that limit.
    assert int(service["stop_grace_period"].removesuffix("s")) > ServerFlags().exit_timeout + 5
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("key", SERVERS, ids=" ".join)
def test_what_a_server_fetches_and_compiles_is_kept_and_its_user_may_write_there(key):
    home = environment()["HOME"]
    assert mounts(SERVERS[key])[home] == "cache"
    made = next(each.value[0] for each in instructions("RUN") if "install -d" in each.value[0])
    assert made.split()[-1] == home and "-o 1000 -g 1000" in made


def test_servers_of_one_file_share_neither_gpu_nor_port():
    for file, parsed in COMPOSE.items():
        servers = [each for each in parsed["services"].values() if "build" in each]
        reserved = [each["deploy"]["resources"]["reservations"]["devices"] for each in servers]
        gpus = [tuple(device.get("device_ids", ["all"])) for devices in reserved for device in devices]
        assert len(set(gpus)) == len(servers), file
        assert all(len(each) == 1 for each in gpus), file
        assert ("all",) not in gpus or len(servers) == 1, file
        published = [port.host for service in parsed["services"].values() for port in ports(service)]
        assert len(set(published)) == len(published), file


def test_the_ways_to_run_servers_differ_only_in_gpus_ports_and_names():
    own = {"ports", "deploy", "networks"}
    by_file = {key: {name: value for name, value in each.items() if name not in own} for key, each in SERVERS.items()}
    node = by_file.pop(("compose.node.yml", "tandem"))
    one, *others = by_file.values()
    assert len(others) == 2 and all(each == one for each in others)
    node["command"] = [each for each in node["command"] if "parallel" not in each]
    assert node | {"shm_size": one["shm_size"]} == one


def test_what_is_mounted_exists():
    for (file, name), service in SERVICES.items():
        for source in map(plain, mounts(service).values()):
            known = (DOCKER / source).is_file() if source.startswith("./") else source in COMPOSE[file]["volumes"]
            assert known, f"{file} {name}: {source}"


def test_prometheus_asks_every_server_by_the_name_it_has():
    config = yaml.safe_load((DOCKER / "prometheus.compose.yml").read_text())
    (asked,) = config["scrape_configs"][0]["dns_sd_configs"]
    assert asked["port"] == TANDEM_PORTS["metrics"]
    for (_, name), service in SERVERS.items():
        aliases = service.get("networks", {}).get("default", {}).get("aliases", [])
        assert set(asked["names"]) <= {name, *aliases}


def test_grafana_is_given_the_dashboard_and_prometheus():
    files = mounts(SERVICES["compose.metrics.yml", "grafana"])
    (provider,) = yaml.safe_load((DOCKER / "grafana/dashboards.yml").read_text())["providers"]
    shown = {
        target: source for target, source in files.items() if str(Path(target).parent) == provider["options"]["path"]
    }
    assert [json.loads((DOCKER / each).read_text())["title"] for each in shown.values()] == ["Tandem"]
    assert {"./grafana/datasource.yml", "./grafana/dashboards.yml"} <= set(files.values())
    (source,) = yaml.safe_load((DOCKER / "grafana/datasource.yml").read_text())["datasources"]
    prometheus = SERVICES["compose.metrics.yml", "prometheus"]
    assert source["url"] == f"http://prometheus:{ports(prometheus)[0].container}" and source["isDefault"]


def test_the_files_that_the_page_and_the_compose_files_name_exist():
    texts = [path.read_text() for path in (ROOT / PAGE, *DOCKER.glob("compose*.yml"))]
    named = [name for text in texts for name in re.findall(r"-f (\S+)", text)]
    linked = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / PAGE).read_text())
    assert len(named) > 5 and [name for name in named if not (ROOT / name).is_file()] == []
    assert [name for name in linked if not (ROOT / "docs" / name).exists()] == []


def test_the_names_in_the_page_are_settings_of_ours_keys_of_compose_or_metrics():
    known = {field.name for field in fields(Settings)} | {family.name for family in FAMILIES}
    known |= {key for service in SERVERS.values() for key in service}
    named = set(re.findall(r"`([a-z]+_[a-z_]+)(?:=[^`]*|: [^`]*)?`", (ROOT / PAGE).read_text()))
    assert named - known == set() and len(named) > 3


def test_the_page_names_the_tag_that_is_built_on():
    tag = COMMANDS[0].value[0].split("=")[1]
    assert set(re.findall(r"\d\d\.\d\d-py3", (ROOT / PAGE).read_text())) == {tag}


def test_plain_tritonserver_is_given_the_repository_that_was_installed():
    prefix = next(each.value[0] for each in instructions("RUN") if each.value[0].startswith("virtualenv")).split()[-1]
    installed = re.search(
        r'"(\S+)/llm" = \["model_repository/llm/config.pbtxt"\]', (ROOT / "pyproject.toml").read_text()
    )[1]
    assert f"tritonserver --model-repository={prefix}/{installed}\n" in (ROOT / PAGE).read_text()
    assert environment()["PATH"].startswith(f"{prefix}/bin:")
