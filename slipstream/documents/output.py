"""What a read document becomes on disk: one Markdown with page marks, and one JSON line a page. Pure."""

import json
import re
from collections.abc import Sequence
from typing import Any

from slipstream.documents.messages import PageDraft, Region

_MARK = re.compile(r"<!--(?=\s*(?:page\s+\d+\s*-->|lossy:))", re.IGNORECASE)


def page_mark(page: int) -> str:
    """Stands before a page's text; a comment, which renderers of Markdown do not show."""
    return f"<!-- page {page} -->"


def lossy_mark(fact: str) -> str:
    """Stands between a page's mark and a text that need not be the target's own."""
    return f"<!-- {fact.replace('--', '- -')} -->"


def markdown_page(page: int, text: str, lossy_facts: Sequence[str] = ()) -> str:
    """A page of the document, with its marks. What looks like one in the text itself is shown, and marks nothing.

    Args:
        lossy_facts: see `Caption.lossy_facts`.
    """
    shown = _MARK.sub("&lt;!--", text)
    marks = "\n".join([page_mark(page), *map(lossy_mark, lossy_facts)])
    return f"{marks}\n\n{shown}\n\n" if shown else f"{marks}\n\n"


def page_record(document: str, draft: PageDraft, **more: Any) -> str:
    """A page as one line of JSON. `more`: what else is known of it, such as a model's text and its receipt."""
    record = {
        "document": document,
        "page": draft.page,
        "width": draft.width,
        "height": draft.height,
        "regions": [region_record(region) for region in draft.regions],
        "warnings": list(draft.warnings),
        "seconds": round(draft.seconds, 3),
    }
    return json.dumps(record | more, ensure_ascii=False) + "\n"


def region_record(region: Region) -> dict[str, Any]:
    """A region as JSON has it."""
    return {
        "order": region.order,
        "kind": region.kind.value,
        "box": list(region.box),
        "text": region.text,
        "score": round(region.score, 4),
        "origin": region.origin.value,
    }
