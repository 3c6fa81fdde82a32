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


@pytest.mark.parametrize("port", ["x", "", "0", "65536", "99999", "-1", "٣"])
def test_a_port_that_is_none_is_named(port):
    with pytest.raises(ValueError, match=rf"--http-port is '{port}'; expected a number from 1 to 65535"):
        _ = ServerFlags((f"--http-port={port}",)).http


@pytest.mark.parametrize("user", [("--http-port",), ("--http-port", "--log-verbose=1")])
def test_a_port_without_a_value_is_refused(user):
    with pytest.raises(ValueError, match=r"expected a number"):
        _ = ServerFlags(user).http


def test_a_time_limit_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"--exit-timeout-secs is 'soon'"):
        _ = ServerFlags(("--exit-timeout-secs=soon",)).exit_timeout


@pytest.mark.parametrize(
    ("address", "host"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::", "[::1]"), ("[::1]", "[::1]"), ("ipv6:::1", "[::1]")],
)
def test_a_client_on_this_machine_has_an_address_to_connect_to(address, host):
    assert ServerFlags((f"--http-address={address}",)).http.host == host


def test_an_address_triton_would_not_understand_is_written_as_it_does():
    flags = ServerFlags(("--http-address=::1", "--grpc-address=::1", "--metrics-address=localhost"))
    assert flags.arguments[-3:] == ["--http-address=ipv6:::1", "--grpc-address=[::1]", "--metrics-address=127.0.0.1"]


@pytest.mark.parametrize("address", ["nosuchhost.invalid", "", "a" * 70])
def test_an_address_that_is_none_is_named(address):
    with pytest.raises(ValueError, match=rf"--http-address is '{address}'; "):
        _ = ServerFlags((f"--http-address={address}",)).http


def test_an_address_of_another_machine_is_not_called_in_use():
    with pytest.raises(ValueError, match=r"cannot assign requested address: http 192.0.2.1:9000$"):
        check_ports([Endpoint("http", "192.0.2.1", 9000)])


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_two_doors_can_not_share_a_port(address):
    with pytest.raises(ValueError, match=r"http and grpc both have port 9000"):
        check_ports([Endpoint("http", address, 9000), Endpoint("grpc", "127.0.0.1", 9000)])


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
