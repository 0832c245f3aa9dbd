"""The head of a page that needs no network, with a policy that permits only what the page contains."""

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files


@cache
def read_asset(name: str) -> str:
    """Return the text of a file of this package, such as report.css."""
    return files("paceline.inspect.report").joinpath(name).read_text(encoding="utf-8")


def build_head(title: str, style: str, script: str = "", has_images: bool = False) -> str:
    """Return the HTML before the body of a page.

    Its Content-Security-Policy permits this style sheet and this script by their digests, and images inside
    the page, so that markup in a name could not run or load anything.
    """
    policy = "; ".join(
        (
            "default-src 'none'",
            *([f"script-src '{_digest(script)}'"] if script else []),
            f"style-src '{_digest(style)}'",
            *(["img-src data:"] if has_images else []),
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{style}</style>
</head>"""


def _digest(text: str) -> str:
    """Return the digest by which a Content-Security-Policy permits a script or a style sheet."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
