"""Asks the host's own server over HTTP: a single file for the host's python3, standard library only, no import of ours.

Usage: `python3 http_probe.py [DEADLINE_S] < requests.json > answers.json`. In: a JSON list of objects with id, url and
optionally method, body, headers, timeout_s, api_key_file, command. Out: a JSON list with one object for each, in order:
id, status, text (bounded), cut, ms, error, detail. Requests go one after another, each on a connection of its own,
without proxies or redirects. A tcp address is connected to, a command is run instead: both have a status 200 when they
succeed. It must never wait longer than the deadline, and exits 0 whenever it could print.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

MAX_TEXT_BYTES = 1 << 20
DEFAULT_DEADLINE_S = 60.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Refused(Exception):
    """A request that cannot be sent: `kind` and words."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def error_kind(error: BaseException) -> str:
    """The few words that callers tell apart."""
    if isinstance(error, Refused):
        return error.kind
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "timeout"
    if isinstance(error, (ConnectionError, http.client.RemoteDisconnected, http.client.IncompleteRead)):
        return "reset"
    if isinstance(error, (http.client.HTTPException, ssl.SSLError)):
        return "protocol"
    return "unreachable" if isinstance(error, OSError) else "request"


def key_header(path: str) -> dict[str, str]:
    """The first key of a file with one key a line, as a header; it stands in no answer."""
    try:
        with open(path, encoding="utf-8") as lines:
            keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    except (OSError, ValueError) as error:
        raise Refused("key-file", f"{path}: {error}") from error
    if not keys:
        raise Refused("key-file", f"{path}: holds no key")
    return {"Authorization": "Bearer " + keys[0]}


def open_connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not open yet, and the path to ask for."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused("request", f"not an http or https address: {url}")
    path = (parts.path or "/") + ("?" + parts.query if parts.query else "")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s), path
    context = ssl.create_default_context()
    if parts.hostname in LOOPBACK:  # a certificate names the public host, never the loopback address
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(parts.hostname, parts.port or 443, timeout=timeout_s, context=context), path


def connect(url: str, timeout_s: float) -> None:
    """Opens a TCP connection and closes it again."""
    parts = urlsplit(url)
    if not parts.hostname or not parts.port:
        raise Refused("request", f"not a tcp address with a port: {url}")
    socket.create_connection((parts.hostname, parts.port), timeout=timeout_s).close()


def run(command: list[str], answer: dict[str, Any], opened: list[Any]) -> None:
    """Runs a command in a process group of its own, without input; what it printed is the answer's text."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    opened.append(process)
    said = process.communicate()[0]
    text = said[:MAX_TEXT_BYTES].decode("utf-8", "replace")
    answer.update(status=500 if process.returncode else 200, text=text, cut=len(said) > MAX_TEXT_BYTES)


def exchange(request: dict[str, Any], timeout_s: float, answer: dict[str, Any], opened: list[Any]) -> None:
    """Sends one request and fills the answer in; `opened` lets the caller cut a connection that hangs."""
    try:
        if request.get("command"):
            run(request["command"], answer, opened)
            return
        if request["url"].startswith("tcp:"):
            connect(request["url"], timeout_s)
            answer.update(status=200, text="", cut=False)
            return
        headers = dict(request.get("headers") or {})
        if request.get("api_key_file"):
            headers.update(key_header(request["api_key_file"]))
        connection, path = open_connection(request["url"], timeout_s)
        opened.append(connection)
        body = request.get("body")
        data = None if body is None else body.encode("utf-8")
        connection.request(request.get("method", "GET"), path, data, {**headers, "Connection": "close"})
        response = connection.getresponse()
        received = response.read(MAX_TEXT_BYTES + 1)
        cut = len(received) > MAX_TEXT_BYTES
        if response.length and not cut:  # read(n) takes an early end for a complete body
            raise http.client.IncompleteRead(received, response.length)
        answer.update(status=response.status, text=received[:MAX_TEXT_BYTES].decode("utf-8", "replace"), cut=cut)
        connection.close()
    except Exception as error:
        answer.update(error=error_kind(error), detail=f"{type(error).__name__}: {error}")


def ask(request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One answer within the time, whatever the server does: a byte a minute would keep a socket timeout waiting."""
    start = time.monotonic()
    answer: dict[str, Any] = {}
    opened: list[Any] = []
    worker = threading.Thread(target=exchange, args=(request, timeout_s, answer, opened), daemon=True)
    worker.start()
    worker.join(timeout_s)
    late: dict[str, Any] = {"error": "timeout", "detail": f"after {timeout_s:g} s"}
    done = late if worker.is_alive() else dict(answer)
    if worker.is_alive():
        hang_up(opened)
    done.update(id=request.get("id", ""), ms=round(1000 * (time.monotonic() - start), 3))
    return done


def hang_up(opened: list[Any]) -> None:
    """Ends a hanging exchange, so that the server stops working for nobody."""
    for connection in opened:
        if isinstance(connection, subprocess.Popen):
            try:
                os.killpg(connection.pid, signal.SIGKILL)
            except OSError:
                return
        elif connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return


def answers(requests: list[dict[str, Any]], deadline_s: float) -> list[dict[str, Any]]:
    """All answers in order; what the deadline left no time for is answered with the error `deadline`."""
    end = time.monotonic() + deadline_s
    found = []
    for request in requests:
        left = end - time.monotonic()
        if left <= 0:
            found.append({"id": request.get("id", ""), "error": "deadline", "detail": f"{deadline_s:g} s were over"})
        else:
            found.append(ask(request, min(float(request.get("timeout_s", 10.0)), left)))
    return found


def main() -> None:
    """Reads, asks, prints."""
    deadline_s = float(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DEADLINE_S
    requests = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    sys.stdout.buffer.write(json.dumps(answers(requests, deadline_s)).encode("utf-8") + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # a worker that still hangs in the resolver must not keep the process


if __name__ == "__main__":
    main()
