"""What mkdocs does to a page before it renders it: equations become MathML, links out of docs/ become paths."""

import re

from latex2mathml.converter import convert

_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the text of every page."""
    parts = _CODE.split(markdown)
    parts[::2] = [_rendered(text) for text in parts[::2]]
    return "".join(parts)


def _rendered(text: str) -> str:
    text = re.sub(r"\$\$(.+?)\$\$", lambda found: convert(found[1].strip(), display="block"), text, flags=re.DOTALL)
    text = re.sub(r"(?<![\\$])\$([^$\n]+)\$", lambda found: convert(found[1]), text)
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (\2)", text)
