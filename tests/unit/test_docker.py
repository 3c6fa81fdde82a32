"""The files in docker/ parse, and name nothing that isn't there. No Docker is needed, and none builds them here."""

from __future__ import annotations

import fnmatch
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose
from dockerfile_parse import DockerfileParser

from backend_lib.cli.flags import _DEFAULTS
from backend_lib.cli.main import main
from backend_lib.config import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = sorted(DOCKER.glob("compose*.yml"))
PORTS = {int(port) for name, port in _DEFAULTS.items() if name.endswith("-port")}


def compose(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def servers() -> list[tuple[str, dict[str, Any]]]:
    named = [(f"{path.name} {name}", each) for path in COMPOSE for name, each in compose(path)["services"].items()]
    return [(name, each) for name, each in named if each.get("image") == "tandem"]


@pytest.fixture(scope="module")
def dockerfile() -> list[dict[str, str]]:
    parser = DockerfileParser(path=str(DOCKER / "Dockerfile"))
    return [each for each in parser.structure if each["instruction"] != "COMMENT"]


def instructions(dockerfile: list[dict[str, str]], name: str) -> list[str]:
    return [each["value"] for each in dockerfile if each["instruction"] == name]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_are_valid(path: Path) -> None:
    """Once YAML has put in what `<<` stands for, as Compose does and this library doesn't."""
    whole = compose(path)
    assert set(PyCompose.from_yaml(yaml.safe_dump(whole)).to_dict()["services"]) == set(whole["services"])


def test_what_is_no_compose_file_is_told() -> None:
    whole = compose(DOCKER / "compose.yml")
    for field, value in (("shm_size", "a lot"), ("shm_sizes", "1gb"), ("restart", "perhaps")):
        wrong = whole["services"]["tandem"] | {field: value}
        with pytest.raises(ValueError, match="tandem"):
            PyCompose.from_yaml(yaml.safe_dump(whole | {"services": {"tandem": wrong}}))


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_paths_and_volumes_exist(path: Path) -> None:
    whole = compose(path)
    for service in whole["services"].values():
        if "build" in service:
            context = (DOCKER / service["build"]["context"]).resolve()
            assert context == ROOT and (context / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DOCKER / source).is_file() if source.startswith(".") else source in whole["volumes"], volume


def test_the_image_is_made_of_files_that_exist_and_are_sent(dockerfile) -> None:
    """`.dockerignore` leaves out all but what is named in it."""
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [source for value in instructions(dockerfile, "COPY") for source in value.split()[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists() and any(fnmatch.fnmatch(source, pattern) for pattern in sent), source
    needed = {"backend_lib", "kernels", "model_repository", "pyproject.toml", "README.md"}
    assert set(copied) == set(sent) == needed


def test_every_instruction_is_one(dockerfile) -> None:
    known = {
        "ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    assert {each["instruction"] for each in dockerfile} <= known
    assert [each["instruction"] for each in dockerfile][:2] == ["ARG", "FROM"]
    for script in instructions(dockerfile, "RUN"):
        assert shlex.split(script)
    for name in ("ENTRYPOINT", "CMD"):
        assert all(isinstance(part, str) for part in json.loads(instructions(dockerfile, name)[-1]))


def test_the_container_does_not_run_as_root(dockerfile) -> None:
    assert instructions(dockerfile, "USER")[-1] == "triton-server"
    names = [each["instruction"] for each in dockerfile]
    assert "RUN" not in names[names.index("USER") :]


def test_ports_are_the_servers(dockerfile) -> None:
    assert {int(port) for port in instructions(dockerfile, "EXPOSE")[0].split()} == PORTS
    assert f":{_DEFAULTS['http-port']}/v2/health/ready" in instructions(dockerfile, "HEALTHCHECK")[0]
    outside: set[str] = set()
    for name, service in servers():
        pairs = [port.split(":") for port in service["ports"]]
        assert {int(inside) for _, inside in pairs} == PORTS, name
        file = name.split()[0]
        assert not outside & {file + port for port, _ in pairs}, "two services of a file have a port in common"
        outside |= {file + port for port, _ in pairs}


def commands(dockerfile: list[dict[str, str]]) -> dict[str, list[str]]:
    return {"Dockerfile": json.loads(instructions(dockerfile, "CMD")[0])} | {
        name: [part.replace("${TANDEM_MODEL:-smollm2}", "smollm2") for part in service["command"]]
        for name, service in servers()
    }


def test_every_server_can_be_reached_and_its_arguments_are_understood(dockerfile, capsys) -> None:
    """`tandem doctor` takes the same arguments as `tandem serve`, and starts nothing."""
    assert json.loads(instructions(dockerfile, "ENTRYPOINT")[0]) == ["tandem", "serve"]
    assert len(commands(dockerfile)) == 4
    for name, command in commands(dockerfile).items():
        assert [f"--{door}-address=0.0.0.0" for door in ("http", "grpc", "metrics")] == command[-3:], name
        ports = [f"--{door}-port={port}" for door, port in (("http", 28000), ("grpc", 28001), ("metrics", 28002))]
        main(["doctor", *command, *ports])
        said = capsys.readouterr().out
        assert "0.0.0.0:28000" in said and "smollm2, context of" in said, said


def test_gpus_are_asked_for_and_not_twice() -> None:
    for path in COMPOSE:
        wanted: list[str] = []
        for name, service in compose(path)["services"].items():
            if service.get("image") != "tandem":
                continue
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"], name
            wanted += device.get("device_ids", [])
        assert len(set(wanted)) == len(wanted)


def test_prometheus_scrapes_the_service_and_grafana_asks_prometheus() -> None:
    server = compose(DOCKER / "compose.yml")["services"]
    (target,) = compose(DOCKER / "prometheus.compose.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in server and port == _DEFAULTS["metrics-port"]
    beside = compose(DOCKER / "compose.monitoring.yml")["services"]
    url = compose(DOCKER / "grafana" / "datasource.yml")["datasources"][0]["url"]
    assert url.removeprefix("http://").split(":")[0] in beside
    mounted = dict(volume.split(":")[:2] for volume in beside["grafana"]["volumes"])
    folder = compose(DOCKER / "grafana" / "dashboards.yml")["providers"][0]["options"]["path"]
    assert Path(mounted["./grafana-dashboard.json"]).parent == Path(folder)
    assert Path(mounted["./grafana/datasource.yml"]).parent.name == "datasources"


def test_the_page_names_settings_and_files_that_exist() -> None:
    page = (ROOT / "docs" / "docker.md").read_text()
    for path in (*COMPOSE, DOCKER / "Dockerfile"):
        assert f"`docker/{path.name}`" in page
    named = [part.split("--set ")[1].split("=")[0] for part in page.split("\n") if "--set " in part]
    assert named and set(named) <= set(Settings().as_dict())
