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
