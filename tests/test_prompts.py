import json
from pathlib import Path

import pytest

from treegraft.data.prompts import PromptError, read_prompts, shipped


def write(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_all_three_forms_of_a_prompt_line_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"question_id": 7, "turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "c"}]}, "",
        {"prompt": "d"},
    )  # fmt: skip
    first, second, third = read_prompts([path])
    assert (first.file, first.id, first.turns) == ("mine", "7", ("a", "b"))
    assert second.messages[0]["content"] == "c" and third.text == "d"


def test_limit_counts_the_prompts_of_each_file(tmp_path: Path) -> None:
    one = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    two = one.with_name("other.jsonl")
    two.write_text(one.read_text())
    assert [p.text for p in read_prompts([one, two], limit=1)] == ["a", "a"]


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "not JSON"), ("[1]", "JSON object"),
        ({"turns": []}, "non-empty list"), ({"turns": [1]}, "non-empty strings"),
        ({"messages": [{"role": "user"}]}, "`role` and `content`"),
        ({"prompt": ""}, "non-empty `prompt`"), ({}, "needs"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: object, complaint: str) -> None:
    path = write(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(PromptError, match=r"mine\.jsonl, line 2") as caught:
        read_prompts([path])
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "field, line",
    [
        ("id", {"id": "\ud83d", "prompt": "good"}), ("prompt", {"prompt": "half \ud83d"}),
        ("turns", {"turns": ["good", "half \ud83d"]}),
        ("messages", {"messages": [{"role": "user", "content": "half \ud83d"}]}),
        ("messages", {"messages": [{"role": "\ud83d", "content": "good"}]}),
    ],
)  # fmt: skip
def test_text_that_is_not_unicode_is_named_by_file_and_line(tmp_path: Path, field: str, line: object) -> None:
    path = write(tmp_path, {"prompt": "whole \U0001f600", "reference": "\ud83d"}, line)
    with pytest.raises(PromptError, match=rf"mine\.jsonl, line 2: `{field}` holds '\\ud83d'"):
        read_prompts([path])
    assert read_prompts([path], limit=1)[0].text == "whole \U0001f600"


def test_a_file_that_is_not_utf_8_is_named_with_its_line_or_encoding(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes('{"prompt": "a"}\r\n\r\n{"prompt": "café"}\r\n'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"mine\.jsonl, line 3: byte 0xe9 is not UTF-8; save"):
        read_prompts([path])
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        path.write_text('{"prompt": "a"}\n', encoding=encoding)
        with pytest.raises(PromptError, match=rf"mine\.jsonl: written in {encoding.upper()}; save it as UTF-8"):
            read_prompts([path])
    odd = tmp_path / "caf\udce9.jsonl"
    odd.write_text('{"prompt": "a"}\n')
    with pytest.raises(PromptError, match=r"caf\\udce9\.jsonl': rename it"):
        read_prompts([odd])
    # Line ends and the mark of UTF-8 may be anyone's.
    path.write_bytes('\ufeff{"prompt": "a"}\r\n{"prompt": "b"}\r{"prompt": "c\u2028"}\n'.encode())
    assert [prompt.text for prompt in read_prompts([path])] == ["a", "b", "c\u2028"]


def test_null_is_absent(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "c", "name": None}]
    path = write(
        tmp_path,
        {"id": None, "question_id": None, "prompt": "a", "turns": None, "messages": None},
        {"id": None, "prompt": None, "turns": ["b"]},
        {"id": None, "question_id": "q", "turns": None, "messages": chat},
    )
    first, second, third = read_prompts([path])
    assert [(first.id, first.text), (second.id, second.turns)] == [("1", "a"), ("2", ("b",))]
    assert third.id == "q" and third.messages == ({"role": "user", "content": "c"},)
    for line in ({"prompt": None}, {"turns": None, "id": None}, {"messages": [{"role": "user", "content": None}]}):
        with pytest.raises(PromptError, match="line 1: "):
            read_prompts([write(tmp_path, line)])


def test_a_repeated_id_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="line 2: id '1'"):
        read_prompts([write(tmp_path, {"id": "1", "prompt": "a"}, {"id": 1, "prompt": "b"})])
    with pytest.raises(PromptError, match=r"absent\.jsonl"):
        read_prompts([tmp_path / "absent.jsonl"])


def test_a_file_may_not_go_by_the_name_of_all_files(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "good"}).rename(tmp_path / "overall.jsonl")
    with pytest.raises(PromptError, match=r"overall\.jsonl: rename it"):
        read_prompts([path])


def test_the_shipped_splits_share_no_prompt() -> None:
    train, bench = read_prompts(shipped("train")), read_prompts(shipped("bench"))
    assert {p.file for p in train} == {p.file for p in bench}
    assert len(train) > len(bench) > 0
    assert not {p.turns for p in train} & {p.turns for p in bench}
