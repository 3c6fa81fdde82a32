"""The flags tritonserver is started with: Tandem's defaults, each given way to what the user passes himself."""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """One of the server's three doors. `address` is numeric."""

    name: str
    address: str
    port: int

    @property
    def host(self) -> str:
        """The address a client on this machine connects to, as a URL has it."""
        return _bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address))

    @property
    def triton_address(self) -> str:
        """The address as tritonserver takes it: its HTTP library and gRPC write IPv6 in different ways."""
        if ":" not in self.address:
            return self.address
        return _bracketed(self.address) if self.name == "grpc" else f"ipv6:{self.address}"

    @property
    def obstacle(self) -> str | None:
        """Why a server can't listen here now, in words; None when it can."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self.address, self.port))
        except OSError as error:
            return "already in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0).lower()
        return None

    def __str__(self) -> str:
        return f"{self.name} {_bracketed(self.address)}:{self.port}"


@dataclass(frozen=True)
class ServerFlags:
    """What the user passed on to tritonserver, completed with defaults."""

    user: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Defaults first, the user's flags as they were given after them, then addresses Triton would misread."""
        defaults = [f"--{name}={value}" for name, value in _DEFAULTS.items() if self._given(name) is None]
        return [*defaults, *self.user, *self._rewritten_addresses()]

    @cached_property
    def http(self) -> Endpoint:
        return self._endpoint("http")

    @cached_property
    def endpoints(self) -> list[Endpoint]:
        """The doors that will be open. Raises ValueError that names the address or port that can't be one."""
        return [self._endpoint(name) for name in ("http", "grpc", "metrics") if self.allows(name)]

    @property
    def exit_timeout(self) -> float:
        """Seconds the server gives its models to end."""
        seconds = self.value("exit-timeout-secs")
        if not re.fullmatch(r"\d+", seconds, re.ASCII):
            raise ValueError(f"--exit-timeout-secs is '{seconds}'; expected a whole number")
        return float(seconds)

    def allows(self, name: str) -> bool:
        """Whether the `http`, `grpc` or `metrics` endpoint is on."""
        return (self._given(f"allow-{name}") or "true").lower() not in _OFF

    def load(self, model: str) -> list[str]:
        """The flag that loads `model` where the server would wait to be told; empty where it loads by itself."""
        explicit = self._given("model-control-mode") == "explicit"
        return [f"--load-model={model}"] if explicit and not {model, "*"} & set(self._all_given("load-model")) else []

    def value(self, name: str) -> str:
        given = self._given(name)
        return _DEFAULTS[name] if given is None else given

    def _endpoint(self, name: str) -> Endpoint:
        port = self.value(f"{name}-port")
        # Port 0 would be one of the system's choice, which nobody could be told.
        if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 1 <= int(port) <= 65535:
            raise ValueError(f"--{name}-port is '{port}'; expected a number from 1 to 65535")
        address = self.value(f"{name}-address")
        try:
            return Endpoint(name, _numeric(address), int(port))
        except (socket.gaierror, UnicodeError) as error:
            raise ValueError(f"--{name}-address is '{address}'; {error.args[-1]}") from None

    def _rewritten_addresses(self) -> list[str]:
        """The last value of a flag counts. Triton would silently listen on 255.255.255.255 for a name it can't read."""
        return [
            f"--{endpoint.name}-address={endpoint.triton_address}"
            for endpoint in self.endpoints
            if endpoint.triton_address != self.value(f"{endpoint.name}-address")
        ]

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
    """Raises ValueError that names the ports that can't be listened on, or that two doors would share."""
    for one, other in itertools.combinations(endpoints, 2):
        if one.port == other.port and (
            one.address == other.address or {"0.0.0.0", "::"} & {one.address, other.address}
        ):
            raise ValueError(f"{one.name} and {other.name} both have port {one.port}; give each one of its own")
    obstacles = {endpoint: endpoint.obstacle for endpoint in endpoints}
    found = sorted({obstacle for obstacle in obstacles.values() if obstacle})
    if found:
        which = "; ".join(f"{text}: {', '.join(str(e) for e in endpoints if obstacles[e] == text)}" for text in found)
        hint = " ".join(
            f"--{endpoint.name}-port=N" for endpoint in endpoints if obstacles[endpoint] == "already in use"
        )
        raise ValueError(which + (f"; choose another with `tandem serve -- {hint}`" if hint else ""))


def _numeric(address: str) -> str:
    """The IP address of a name or an address, IPv4 before IPv6. Raises socket.gaierror."""
    written = address.removeprefix("ipv6:").strip("[]")
    found = socket.getaddrinfo(written, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
