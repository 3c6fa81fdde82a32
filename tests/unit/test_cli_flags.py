"""The flags tritonserver is started with."""

from __future__ import annotations

import socket

import pytest

from backend_lib.cli.flags import Endpoint, ServerFlags, check_ports


def test_defaults_listen_on_loopback_only():
    arguments = ServerFlags().arguments
    assert {f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")} <= set(arguments)
    assert [(each.name, each.port) for each in ServerFlags().endpoints] == [
        ("http", 8000),
        ("grpc", 8001),
        ("metrics", 8002),
    ]


@pytest.mark.parametrize(
    "user", [("--http-port=9000",), ("--http-port", "9000"), ("--http-port=1", "--http-port=9000")]
)
def test_a_users_flag_replaces_the_default(user):
    flags = ServerFlags(user)
    assert flags.http.port == 9000
    assert "--http-port=8000" not in flags.arguments
    assert flags.arguments[-len(user) :] == list(user)


def test_a_closed_endpoint_needs_no_port():
    flags = ServerFlags(("--allow-metrics=false", "--allow-grpc", "0"))
    assert [endpoint.name for endpoint in flags.endpoints] == ["http"]


def test_a_port_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"--http-port is 'x'"):
        _ = ServerFlags(("--http-port=x",)).http


def test_a_client_reaches_a_server_on_all_interfaces_over_loopback():
    assert ServerFlags(("--http-address=0.0.0.0",)).http.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ((), []),
        (("--model-control-mode=explicit",), ["--load-model=llm"]),
        (("--model-control-mode=explicit", "--load-model=other"), ["--load-model=llm"]),
        (("--model-control-mode=explicit", "--load-model=llm"), []),
        (("--model-control-mode=explicit", "--load-model=*"), []),
    ],
)
def test_explicit_control_still_loads_the_model_that_is_served(user, expected):
    assert ServerFlags(user).load("llm") == expected


def test_occupied_ports_are_named_with_the_flag_that_moves_them():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"http 127.0.0.1:{port}.*--http-port=N"):
            check_ports([Endpoint("http", "127.0.0.1", port)])
    check_ports([Endpoint("http", "127.0.0.1", port)])
