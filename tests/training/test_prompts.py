import json
from pathlib import Path

import pytest

from coppice.errors import StartError
from training.prompts import HeldOut, read_prompts


def texts(path: Path) -> list[list[tuple[str, str]]]:
    return [[(m.role, m.content) for m in prompt] for prompt in read_prompts(path)]


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\n two words \n")
    assert texts(path) == [[("user", "one")], [("user", "two words")]]


def test_every_layout_of_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    entries = [
        {"prompt": "p"},
        {"instruction": "i"},
        {"text": "t"},
        {"turns": ["first", "second"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
        {"conversations": [{"from": "gpt", "value": "without a question"}]},
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    assert texts(path) == [
        [("user", "p")],
        [("user", "i")],
        [("user", "t")],
        [("user", "first")],
        [("system", "s"), ("user", "u")],
        [("user", "h")],
    ]


@pytest.mark.parametrize("cut", [0, 1, 9, 40])
def test_a_list_that_is_cut_off_counts_as_far_as_it_goes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.json"
    whole = json.dumps([{"prompt": "first"}, {"prompt": "second [1, 2], ]"}, {"prompt": "third"}])
    path.write_text(whole[: len(whole) - cut])
    expected = ["first", "second [1, 2], ]", "third"]
    kept = 3 if cut <= 1 else 2 if cut < 20 else 1
    assert texts(path) == [[("user", text)] for text in expected[:kept]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "{not json"),
        ("a.jsonl", '["a list"]'),
        ("a.jsonl", '{"unknown": 1}'),
        ("b.json", "[1, 2]"),
        ("a.txt", None),
    ],
)
def test_what_is_no_prompt_file_is_refused_by_name(
    tmp_path: Path, name: str, content: str | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError, match=str(path)):
        texts(path)


def test_prompts_that_share_a_run_of_words_with_held_out_ones_overlap(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    held = "Darrell and Allen's ages are in the ratio of 7:11, he said."
    path.write_text(
        "\n".join(
            [
                held,
                "Please tell me: darrell AND allen s ages are in the RATIO of",  # as words, equal
                "Their ages are in the ratio of 3:11",
                "Darrell",
            ]
        )
    )
    held_path = tmp_path / "held.txt"
    held_path.write_text(held)
    held_out = HeldOut(read_prompts(held_path))
    assert [prompt in held_out for prompt in read_prompts(path)] == [True, True, False, False]
