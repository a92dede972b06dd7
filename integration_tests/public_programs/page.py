from pathlib import Path

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = Path("/tmp/page.md")


def page():
    return ""
