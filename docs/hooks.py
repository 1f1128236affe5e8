"""What mkdocs does to a page: equations become MathML, and links out of docs/ become paths."""

import re
from urllib.parse import quote, unquote

from latex2mathml.converter import convert

_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the text of every page."""
    parts = _CODE.split(markdown)
    parts[::2] = [_rendered(text) for text in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: object) -> str:
    """Called by mkdocs with the HTML of every page."""
    return re.sub(r'<i data-tex="([^"]+)"></i>', lambda found: convert(unquote(found[1])), html)


def _rendered(text: str) -> str:
    text = re.sub(r"\$\$(.+?)\$\$", lambda found: convert(found[1].strip(), display="block"), text, flags=re.DOTALL)
    # Markdown takes <math> for a block where it begins a line, so inline equations are inserted after it has run.
    text = re.sub(r"(?<![\\$])\$([^$\n]+)\$", lambda found: f'<i data-tex="{quote(found[1])}"></i>', text)
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (\2)", text)
