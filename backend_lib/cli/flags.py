"""The flags tritonserver is started with: Tandem's defaults, each given way to what the user passes himself."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

# Triton listens on every interface unless told otherwise; a laptop or a shared machine should not.
_DEFAULTS = {
    "http-address": "127.0.0.1",
    "grpc-address": "127.0.0.1",
    "metrics-address": "127.0.0.1",
    "http-port": "8000",
    "grpc-port": "8001",
    "metrics-port": "8002",
    "log-info": "false",
    "exit-timeout-secs": "10",
}
_OFF = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Endpoint:
    """One of the server's three doors."""

    name: str
    address: str
    port: int

    @property
    def host(self) -> str:
        """The address a client on this machine connects to."""
        return "127.0.0.1" if self.address == "0.0.0.0" else self.address

    @property
    def is_free(self) -> bool:
        """Whether a server could listen here now."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.address, self.port))
            except OSError:
                return False
        return True


@dataclass(frozen=True)
class ServerFlags:
    """What the user passed on to tritonserver, completed with defaults."""

    user: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Defaults first, the user's flags as they were given after them."""
        return [f"--{name}={value}" for name, value in _DEFAULTS.items() if self._given(name) is None] + list(self.user)

    @property
    def http(self) -> Endpoint:
        return self._endpoint("http")

    @property
    def endpoints(self) -> list[Endpoint]:
        """The doors that will be open."""
        return [self._endpoint(name) for name in ("http", "grpc", "metrics") if self.allows(name)]

    @property
    def exit_timeout(self) -> float:
        """Seconds the server gives its models to end."""
        return float(self.value("exit-timeout-secs"))

    def allows(self, name: str) -> bool:
        """Whether the `http`, `grpc` or `metrics` endpoint is on."""
        return (self._given(f"allow-{name}") or "true").lower() not in _OFF

    def load(self, model: str) -> list[str]:
        """The flag that loads `model` where the server would wait to be told; empty where it loads by itself."""
        explicit = self._given("model-control-mode") == "explicit"
        return [f"--load-model={model}"] if explicit and not {model, "*"} & set(self._all_given("load-model")) else []

    def value(self, name: str) -> str:
        return self._given(name) or _DEFAULTS[name]

    def _endpoint(self, name: str) -> Endpoint:
        port = self.value(f"{name}-port")
        if not port.isdecimal():
            raise ValueError(f"--{name}-port is '{port}'; expected a number")
        return Endpoint(name, self.value(f"{name}-address"), int(port))

    def _given(self, name: str) -> str | None:
        """The user's value of a flag; the last one counts."""
        given = self._all_given(name)
        return given[-1] if given else None

    def _all_given(self, name: str) -> list[str]:
        """All values of a flag, written `--name=value` or `--name value`."""
        found = []
        for flag, following in zip(self.user, (*self.user[1:], ""), strict=False):
            if flag.startswith(f"--{name}="):
                found.append(flag.partition("=")[2])
            elif flag == f"--{name}":
                found.append(following)
        return found


def check_ports(endpoints: Sequence[Endpoint]) -> None:
    """Raises ValueError that names the ports somebody else listens on."""
    taken = [endpoint for endpoint in endpoints if not endpoint.is_free]
    if taken:
        which = ", ".join(f"{endpoint.name} {endpoint.address}:{endpoint.port}" for endpoint in taken)
        hint = " ".join(f"--{endpoint.name}-port=N" for endpoint in taken)
        raise ValueError(f"already in use: {which}; choose another with `tandem serve -- {hint}`")
