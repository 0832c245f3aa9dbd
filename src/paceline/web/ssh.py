"""Show runs of another machine: one ssh forwards a local port to the Unix socket of a server there."""

import contextlib
import re
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import LaunchError
from paceline.web.listeners import listen_on_port

# A host, a user on a host, or a name of ~/.ssh/config; what follows the colon is a path there.
REMOTE = re.compile(r"((?:[\w.][\w.-]*@)?[\w.][\w.-]*):(.*)")
TOKEN = re.compile(r"http://localhost/\?token=([\w-]+)")
NOT_FOUND, NO_CONNECTION = 127, 255  # exit statuses of a shell and of ssh


def parse_remote(text: str) -> tuple[str, str] | None:
    """Return host and path of HOST:PATH; None for a path of this machine."""
    match = REMOTE.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    return match[1], match[2]


def watch_remote(host: str, path: str, program: str, port: int, options: Sequence[str] = ()) -> None:
    """Run `paceline watch` on a host until Ctrl-C, and print the address here. Raises LaunchError.

    program: the command of Paceline there. port: on this machine; 0 takes a free one. options: of the
    command there."""
    if shutil.which("ssh") is None:
        raise LaunchError("HOST:PATH requires ssh, which is not installed")
    with listen_on_port(port) as free:  # closed again, so that ssh can listen on it
        port = free.getsockname()[1]
    socket = f"/tmp/paceline-{secrets.token_hex(12)}/socket"
    words = [*shlex.split(program), "watch", path or "runs", "--socket", socket, "--until-eof", *options]
    forward = f"127.0.0.1:{port}:{socket}"
    command = ["ssh", "-T", "-o", "ExitOnForwardFailure=yes", "-L", forward, "--", host, shlex.join(words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ssh:
        assert ssh.stdin is not None
        assert ssh.stdout is not None
        try:
            match = next(filter(None, map(TOKEN.search, ssh.stdout)), None)
            if match is None:
                raise _explain(host, program, ssh.wait())
            address = f"http://127.0.0.1:{port}/?token={match[1]}"
            print(f"{address}\nCtrl-C ends it; training is not affected", flush=True)
            status = ssh.wait()
            raise LaunchError(f"ssh to {host} ended with status {status}; start paceline watch again")
        except KeyboardInterrupt:
            pass
        finally:
            with contextlib.suppress(OSError):
                ssh.stdin.close()  # the server there ends at the end of its input
            with contextlib.suppress(subprocess.TimeoutExpired):
                ssh.wait(5)
            if ssh.poll() is None:
                ssh.send_signal(signal.SIGTERM)


def _explain(host: str, program: str, status: int) -> LaunchError:
    if status == NO_CONNECTION:
        return LaunchError(f"ssh could not connect to {host}; check: ssh {host}")
    if status == NOT_FOUND:
        return LaunchError(
            f"{host} has no program {program}; name it with --program, e.g. --program .venv/bin/paceline"
        )
    return LaunchError(f"paceline watch failed on {host} with status {status}; its message is above")
