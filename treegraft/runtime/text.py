"""Text that is not Unicode, which no tokenizer takes."""

import json
from typing import Any


def not_unicode(value: Any) -> str:
    """What in `value`, a text or lists and dicts of such, is no character, in words; "" where all is.

    Python reads a byte that is not UTF-8 in an argument, and a lone \\ud83d in JSON, as half of a surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        return f"holds {half!r}, which is no character but a byte that is not UTF-8, or half of a surrogate pair"
    return ""
