"""How reports become pages and JUnit files. Pages are templates beside this file; matplotlib draws their charts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any
from xml.etree import ElementTree

from voicehub_aot.errors import MissingDependency
from voicehub_aot.spec.bucket import label


def html_tools() -> tuple[Any, Any]:
    """jinja2, and the module that draws. Raises MissingDependency without the `report` extra."""
    try:
        import jinja2

        from voicehub_aot.artifacts import charts
    except ImportError as error:
        raise MissingDependency(
            f"the HTML report needs jinja2 and matplotlib ({error}); pip install 'voicehub-aot[report]'"
        ) from error
    return jinja2, charts


def render(template: str, filters: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """One self-contained page. Raises MissingDependency without the `report` extra."""
    jinja2, _ = html_tools()
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_source),
    )
    environment.filters |= {"label": label, **filters}
    return environment.get_template(template).render(**values)  # type: ignore[no-any-return]


def _source(template: str) -> str:
    return resources.files("voicehub_aot.artifacts").joinpath(template).read_text(encoding="utf-8")


def junit_document(suite: ElementTree.Element, about: Mapping[str, str]) -> str:
    """A JUnit file of one suite. about: attributes of the whole."""
    root = ElementTree.Element("testsuites", dict(about))
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def xml_text(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold, e.g. a compiler's colours in a note."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
