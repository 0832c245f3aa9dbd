"""JupyterLab in a Slurm job: its job script, a pure function, and the wait until it accepts connections.

The server listens on a Unix socket in a folder of the node that only this user can open, not on a port. Its
token is in a file of this user, and in no command line, variable or log.
"""

import re
import secrets
import time
from pathlib import Path

from paceline.errors import LaunchError, RunError
from paceline.files import read_own, reason, write_secret
from paceline.launch.slurm import client
from paceline.launch.slurm.job_script import Job, describe_head, quote_word, render_environment
from paceline.launch.slurm.site import Site

POLL_S = 0.5
TOKEN, TUNNEL, SCRIPT = "token", "tunnel", "job.sh"
PORT = 8888  # on the computer of the user

_SERVE = r"""
# Only this user can open the folder of the socket, and the file of the token.
umask 077
socket=$(mktemp -d)/jupyter.sock || exit
export JUPYTER_TOKEN_FILE="$run/token" JUPYTER_RUNTIME_DIR="${socket%/*}"
trap 'rm -rf "${socket%/*}" "$run/tunnel"' EXIT
server=
trap 'echo "the time limit of the job is near: save the notebooks"' USR1
trap 'kill "$server"' TERM
[ "$EUID" = 0 ] && as_root=--allow-root || as_root=
PYTHON -m jupyterlab --no-browser --ServerApp.sock="$socket" --ServerApp.sock_mode=0600 $as_root &
server=$!
# The server writes this file when it accepts connections; the socket is there before.
ready() { compgen -G "${socket%/*}/jpserver-*.json" > /dev/null; }
while ! ready && kill -0 "$server" 2> /dev/null; do sleep 0.2; done
if ready; then
    user=$(id -un)
    echo "ssh -N -J $user@$SLURM_SUBMIT_HOST -L PORT:$socket $user@$(hostname)" > "$run/tunnel.new"
    mv "$run/tunnel.new" "$run/tunnel"
fi
while wait "$server"; status=$?; kill -0 "$server" 2> /dev/null; do :; done
exit "$status"
""".strip("\n")


def render_jupyter(job: Job, site: Site) -> str:
    """Return the job script. Raises LaunchError for a site whose jobs run in a container."""
    if site.container is not None:
        raise LaunchError(
            f"--jupyter starts JupyterLab outside of containers, and the site has container="
            f"{site.container!r}; use a site file with conda or venv"
        )
    python = quote_word(job.python) if site.conda is None and site.venv is None else "python"
    head = [line for line in describe_head(job, site) if line != "#SBATCH --requeue"]
    serve = _SERVE.replace("PYTHON", python).replace("PORT", str(PORT))
    return "\n".join(["#!/bin/bash", *head, "", render_environment(job, site), "", serve]) + "\n"


def prepare_folder(folder: Path, script: str) -> Path:
    """Create the private folder of a job with its script and a new token. Returns the script.

    Raises RunError.
    """
    try:
        folder.mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        write_secret(folder / TOKEN, secrets.token_hex(24))
        write_secret(folder / SCRIPT, script)
    except OSError as error:
        raise RunError(f"cannot create {folder}: {reason(error)}; choose another --run-dir") from error
    return folder / SCRIPT


def wait_for_tunnel(folder: Path, job: str) -> str:
    """Return the command of the tunnel when the server of a job accepts connections.

    Raises LaunchError if the job ends before, with the last line of its log.
    """
    while True:
        status = client.status(job)
        if (folder / TUNNEL).exists():
            return read_own(folder / TUNNEL).strip()
        if status is None or not status.is_active:
            ended = "is unknown to Slurm" if status is None else f"ended: {status.state}"
            raise LaunchError(f"job {job} {ended}{_read_last_line(folder)}")
        time.sleep(POLL_S)


def _read_last_line(folder: Path) -> str:
    """Return the last line of the logs of a job, and a fix if JupyterLab is missing."""
    logs = sorted(path for path in folder.iterdir() if path.name not in (TOKEN, SCRIPT))
    text = "\n".join(path.read_text(errors="replace") for path in logs if path.is_file()).strip()
    if re.search(r"No module named '?jupyterlab", text):
        return "; its Python has no JupyterLab; run there: pip install 'paceline[jupyter]'"
    return f": {text.splitlines()[-1]}" if text else ""
