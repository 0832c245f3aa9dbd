"""Who may read the page of `paceline watch`. Requests are written byte by byte; the server is the command."""

import base64
import json
import os
import stat
import subprocess
import sys
import time

import pytest

from command import paceline
from pages import read_blocks
from run_lines import folder, started
from watching import watch, why_not_built

# An image of one pixel, which another program wrote.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
pytestmark = pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    at = tmp_path_factory.mktemp("watch")
    (at / "runs").mkdir()
    run = folder(at / "runs" / "secret-name", [started(0, 1.7e9)])
    run.ranks.mkdir()
    (run.ranks / "0.log").write_text("hello from rank 0\n\x1b[31mred")
    (run.ranks / "1.log").symlink_to("/etc/passwd")
    (run.path / "0.log").write_text("outside")
    (run.figures / "errors").mkdir(parents=True)
    (run.figures / "errors/step_000000005.png").write_bytes(PNG)
    (run.figures / "errors/step_000000006.png").write_text("<svg><script>alert(1)</script></svg>")
    (run.path / "outside.png").write_bytes(PNG)
    (run.figures / "errors/step_000000007.png").symlink_to(run.path / "outside.png")
    (run.figures / "linked").symlink_to(run.figures / "errors")
    with watch(at / "runs", at=at) as watching:
        yield watching


def run_id(server) -> str:
    return next(server.messages())["lists"]["runs"]["rows"][0]["id"]


def test_user_sees_the_page(server):
    page = server.ask("")
    assert page.status == 200
    assert "text/html" in page.headers["content-type"]
    assert server.ask("page.js").status == server.ask("page.css").status == 200
    assert server.ask("log?rank=0&run=" + run_id(server)).text == "hello from rank 0\n\ufffd[31mred"


@pytest.mark.parametrize("target", ["", "page.js", "stream", "log?run=x&rank=0", "curve?name=loss"])
def test_request_without_the_cookie_is_refused(server, target):
    for cookie in (None, "paceline=", "paceline=wrong", f"paceline={server.token}", f"other={server.cookie}"):
        answer = server.ask(target, cookie=cookie)
        assert answer.status == 403
        assert b"secret-name" not in answer.body


@pytest.mark.parametrize("token", ["", "wrong", "%C3%A9", "%00", "a" * 500])
def test_wrong_token_sets_no_cookie(server, token):
    for target in (f"/?token={token}", "/", f"/?other={server.token}"):
        answer = server.ask(target, cookie=None)
        assert answer.status == 403
        assert "set-cookie" not in answer.headers


def test_cookie_is_for_this_server_only(server):
    """Browsers send cookies to all ports of a host, but only below their path, which nobody can guess."""
    cookie = server.ask(f"/?token={server.token}", cookie=None).headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", f"Path={server.path}"} <= {*cookie.split("; ")}
    assert len(server.path) > 16
    assert server.token not in cookie
    assert server.ask("/page.js").status == server.ask("/other/page.js").status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", ""]
)
def test_name_that_resolves_to_loopback_is_refused(server, host):
    """DNS rebinding: the browser sends the name of the other site as Host."""
    for target in ("", f"/?token={server.token}"):
        answer = server.ask(target, Host=host)
        assert answer.status in (400, 403)
        assert "set-cookie" not in answer.headers
    assert server.ask("", Host="localhost:1234").status == 200  # forwarded by ssh to another port


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_request_of_another_site_is_refused(server, site):
    assert server.ask("page.js", Sec_Fetch_Site=site).status == 403
    assert server.ask("page.js", Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
def test_only_get_is_answered(server, method):
    assert server.ask("", method=method).status == 405


@pytest.mark.parametrize(
    "target",
    [
        "../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "page.js/../../access.py",
        "static/page.js",
        "secret-name/events.jsonl",
        "log?rank=0&run=secret-name",
        "log?rank=0&run=../secret-name",
        "log?rank=0&run=",
        "curve?name=step:loss&run=secret-name",
    ],
)
def test_no_path_of_a_request_reaches_a_file(server, target):
    answer = server.ask(target)
    assert answer.status == 404
    assert b"root:" not in answer.body


@pytest.mark.parametrize("rank", ["1", "../0", "..%2f0", "-1", "0.5", "%00", "%C2%B2", ""])
def test_log_is_only_that_of_a_rank(server, rank):
    """Rank 1 has a link to another file."""
    answer = server.ask(f"log?run={run_id(server)}&rank={rank}")
    assert answer.status == 404
    assert b"outside" not in answer.body
    assert b"root:" not in answer.body


def test_rank_without_files_is_not_an_error(server):
    """The launcher may keep the output, and ranks that start have no heartbeat yet."""
    for target, what in (("log", "no output"), ("rank", "no heartbeat")):
        answer = server.ask(f"{target}?run={run_id(server)}&rank=7")
        assert answer.status == 200
        assert f"rank 7 has {what} in " in answer.text


def test_figure_is_served_by_its_identifier_only(server):
    """A link, and a file that is not PNG, are not served; the answer has no other type than PNG."""
    run = run_id(server)
    [figure] = next(server.messages(run=run))["panels"]["figures"]["figures"]
    assert (figure["name"], figure["steps"]) == ("errors", [5, 6, 7])
    assert "errors" not in figure["id"]
    good = server.ask(f"figure?run={run}&figure={figure['id']}&step=5")
    assert (good.status, good.headers["content-type"], good.body) == (200, "image/png", PNG)
    for step in (6, 7, 8):
        answer = server.ask(f"figure?run={run}&figure={figure['id']}&step={step}")
        assert (answer.status, answer.body) == (204, b"")
    for name in ("errors", "linked", "../errors", ""):
        assert server.ask(f"figure?run={run}&figure={name}&step=5").status == 404
    for step in ("", "-1", "5.0", "../5", "x"):
        assert server.ask(f"figure?run={run}&figure={figure['id']}&step={step}").status == 404
    assert server.ask(f"figure?run=x&figure={figure['id']}&step=5").status == 404


def test_browser_that_asks_for_an_icon_gets_no_error(server):
    """Browsers ask for it beside a refusal in plain text, and report a missing file to the next page."""
    answer = server.ask("/favicon.ico", cookie=None)
    assert (answer.status, answer.body) == (204, b"")
    assert server.ask("/favicon.png", cookie=None).status == 403


def test_every_answer_has_the_policy(server):
    targets = [("", {}), ("page.js", {}), ("none", {}), ("", {"cookie": None}), ("", {"method": "POST"})]
    for target, options in [*targets, (f"/?token={server.token}", {}), ("curve?run=x", {})]:
        headers = server.ask(target, **options).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


def test_long_requests_are_refused(server):
    assert server.ask("curve?name=" + "a" * 3000).status == 414
    assert server.ask("", cookie="paceline=" + "a" * 100_000).status in (400, 403)
    assert server.ask(f"curve?name={'a' * 500}&axis={'b' * 500}&run={run_id(server)}").status == 404


def test_output_has_the_token_once(server):
    """A log of requests would contain it."""
    output = server.output.output_so_far()
    assert output.out.count(server.token) == 1
    assert output.err == ""


def test_pages_that_were_closed_do_not_count(server):
    """32 pages may be open at once. Browsers that close theirs, or are killed, make room."""
    for _ in range(3):
        opened = [server.send(f"{server.path}stream", "GET", server.cookie) for _ in range(32)]
        for connection in opened:
            assert connection.recv(12) == b"HTTP/1.1 200"
        answer = server.ask("stream")
        assert (answer.status, answer.text) == (503, "32 pages are open; close one")
        for connection in opened:
            connection.close()
        deadline = time.monotonic() + 60
        while True:  # the server sees the end of a connection at its next look
            with server.send(f"{server.path}stream", "GET", server.cookie) as connection:
                if connection.recv(12) == b"HTTP/1.1 200":
                    break
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_socket_is_only_for_its_user(tmp_path):
    folder(tmp_path / "run", [started(0, 1.7e9)])
    path = tmp_path / "private/socket"
    with watch(tmp_path / "run", "--socket", str(path), at=tmp_path) as watching:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert watching.ask("").status == 200
        assert watching.ask("", cookie=None).status == 403
        again = paceline("watch", tmp_path / "run", "--socket", path, at=tmp_path)
        assert again.status == 2
        assert "File exists" in again.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no such folder: nowhere"),
        (
            ["--port", "{port}"],
            "cannot listen on port {port}: Address already in use; choose another",
        ),
        (["--port", "70000"], "65535"),
        (["--port", "8000", "--socket", "a/b"], "give only one of them"),
    ],
)
def test_bad_input_is_one_sentence(server, tmp_path, words, message):
    (tmp_path / "runs").mkdir()
    port = str(server.address)
    result = paceline("watch", *(word.format(port=port) for word in words), at=tmp_path)
    assert result.status == 2
    assert message.format(port=port) in result.err
    assert "Traceback" not in result.all


def test_commands_of_the_page(tmp_path):
    (tmp_path / "runs").mkdir()
    folder(tmp_path / "runs/a", [started(0, 1.7e9)])
    commands = [
        line.partition("#")[0].split() for line in read_blocks("docs/watch.md")["commands"].splitlines()
    ]
    assert len(commands) == 2
    for program, name, *words in commands:
        assert (program, name) == ("paceline", "watch")
        with watch(*words, at=tmp_path) as watching:
            assert watching.ask("").status == 200


def test_missing_extra_is_named(tmp_path):
    (tmp_path / "runs").mkdir()
    code = "import sys; sys.modules['uvicorn'] = None; from paceline.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "watch"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert 'pip install "paceline[web]"' in result.stderr
    assert "Traceback" not in result.stderr


def test_damaged_runs_are_listed_with_their_problem(tmp_path):
    folder(tmp_path / "good", [started(0, 1.7e9)])
    bad = folder(tmp_path / "bad", [])
    (bad.path / "events.jsonl").unlink()
    os.mkfifo(bad.path / "events.jsonl")  # a reader that opens it would wait forever
    (tmp_path / "no-run").mkdir()
    with watch(tmp_path, at=tmp_path) as watching:
        rows = {row["name"]: row for row in next(watching.messages())["lists"]["runs"]["rows"]}
        assert {*rows} == {"good", "bad"}
        assert rows["bad"]["state"] == "damaged"
        assert "events.jsonl" in rows["bad"]["problem"]
        message = next(watching.messages(run=rows["bad"]["id"]))
        assert any("events.jsonl" in text for text in message["panels"]["problems"])
        assert json.dumps(message)
