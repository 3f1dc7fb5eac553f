"""A server that half a request cannot hold: over real sockets, with limits of a fraction of a second."""

import json
import signal
import socket
import time
from pathlib import Path

import fresh
import pytest

pytest.importorskip("fastapi")

SERVER = """
import sys
sys.path.insert(0, sys.argv[2])
from dataclasses import replace
from small_explorer import noise, small_model
from cumulant.web import Example, Limits, create_app, serve

limits = replace(Limits(), header_seconds=1, body_seconds=float(sys.argv[1]), closing_seconds=1)
app = create_app({"softmax": small_model("softmax")}, [Example(noise(0), "0")], limits)
with serve.listen("127.0.0.1", 0) as door:
    print(door.getsockname()[1], flush=True)
    serve.serve(app, door, limits)
"""


@pytest.fixture(params=[1])
def server(request, tmp_path):
    """Its process, which gives a body so many seconds, and its port."""
    process = fresh.begun("-c", SERVER, str(request.param), str(Path(__file__).parent), folder=tmp_path)
    yield process, int(process.first_line())
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


def answer(door):
    """All that comes back until the server closes the connection."""
    door.settimeout(20)
    received = b""
    while part := door.recv(4096):
        received += part
    return received


def test_half_a_head_and_half_a_body_are_given_up(server):
    port = server[1]
    with socket.create_connection(("127.0.0.1", port)) as head:
        head.sendall(b"GET / HT")
        assert answer(head) == b""  # closed without a word
    start = b"POST /api/images HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nhalf"
    with socket.create_connection(("127.0.0.1", port)) as body:
        body.sendall(start)
        received = answer(body)
    assert received.startswith(b"HTTP/1.1 408")
    assert json.loads(received.rsplit(b"\r\n\r\n", 1)[1])["error"] == "too_slow"
    with socket.create_connection(("127.0.0.1", port)) as whole:
        whole.sendall(b"GET /api/info HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert answer(whole).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("server", [600], indirect=True)
def test_ctrl_c_does_not_wait_for_half_an_upload(server):
    process, port = server
    head = b"POST /api/images HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\nexpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as waiting:
        waiting.settimeout(60)
        waiting.sendall(head)
        assert waiting.recv(4096).startswith(b"HTTP/1.1 100")  # from here on the application waits for the body
        waiting.sendall(b"half")
        process.send_signal(signal.SIGINT)
        patience = time.monotonic() + 20
        while process.poll() is None:
            assert time.monotonic() < patience, "it waits for the rest of the upload"
            time.sleep(0.02)
