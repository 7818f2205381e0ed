import gzip
import json
import random
import sys

import numpy as np
import pytest
from conftest import disk_of

import data

TEXTS = [
    "Once upon a time.",
    "",
    " ",
    "\n\n\t \r\n",
    "\0\x01\x1b\x7f\x85",
    "caf\u00e9 cafe\u0301 \u00df \u0130 \ufb01",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u202eright to left\u202c \ufeff\u2028\u2029\u3000",
    "\u6f22\u5b57 \u0e01\u0e33 \U00010ffd\U0010ffff",
    "a" * 3000,
]


def put(path, content):
    """Write text or bytes, gzipped if the name says so."""
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def problem(path):
    """The one line that reading a file ends with."""
    with pytest.raises(data.Problem) as caught:
        list(data.read_stories(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_the_mark_that_some_editors_put_first_is_no_part_of_a_story(tmp_path):
    path = put(tmp_path / "s.txt", b"\xef\xbb\xbfOnce.\n<|endoftext|>\nTwice.")
    assert [text for text, _ in data.read_stories(path)] == ["Once.", "Twice."]


# ---- the tokenizer


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_any_text_comes_back_from_its_tokens(text):
    assert data.decode(data.encode(text)) == text


def test_random_unicode_comes_back_from_its_tokens():
    draw = random.Random(0)
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    text = "".join(map(chr, draw.sample(points, 5000)))
    assert data.decode(data.encode(text)) == text


def test_every_byte_has_a_token_and_the_vocabulary_is_full():
    known = [data.encoding().decode_single_token_bytes(token) for token in range(data.END)]
    assert {bytes([byte]) for byte in range(256)} <= set(known)
    assert len(set(known)) == data.encoding().n_vocab - 1 == 4095


def test_text_that_spells_the_end_mark_gets_no_end_token():
    tokens = data.encode("The end.<|endoftext|>Not yet.")
    assert data.END not in tokens
    assert data.decode(tokens) == "The end.<|endoftext|>Not yet."


def test_decoding_leaves_the_end_token_out():
    assert data.decode([*data.encode("The end."), data.END]) == "The end."


def test_a_tokenizer_trained_here_round_trips_and_its_end_is_4095(tmp_path, monkeypatch):
    pytest.importorskip("rustbpe")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(3000)]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(data, "TOKENIZER", tmp_path / "tokenizer.tiktoken")
            data.train_tokenizer(" ".join(words[start : start + 20]) for start in range(0, 3000, 20))
            assert len(data.TOKENIZER.read_bytes().splitlines()) == 4095
            assert data.encoding().encode_single_token(data.END_TEXT) == 4095
            assert all(data.decode(data.encode(text)) == text for text in TEXTS)
            assert len(data.encode(" ".join(words))) < 4 * 3000  # of 8 characters each
            with pytest.raises(data.Problem, match="pass more"):
                data.train_tokenizer(["too little"])
    finally:
        data.encoding.cache_clear()


@pytest.mark.parametrize("lines", [None, 0, 1000])
def test_a_missing_or_cut_tokenizer_is_a_problem(tmp_path, monkeypatch, lines):
    if lines is not None:
        (tmp_path / "none.tiktoken").write_bytes(b"".join(data.TOKENIZER.read_bytes().splitlines(keepends=True)[:lines]))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(data, "TOKENIZER", tmp_path / "none.tiktoken")
            data.encoding.cache_clear()
            with pytest.raises(data.Problem, match="none.tiktoken"):
                data.encode("text")
    finally:
        data.encoding.cache_clear()


# ---- reading stories


@pytest.mark.parametrize("name", ["s.txt", "s.txt.gz"])
def test_a_text_file_is_split_at_the_end_marks(tmp_path, name):
    path = put(tmp_path / name, "One.\nStill one.\n<|endoftext|>\nTwo.\r\n<|endoftext|>\n\n<|endoftext|>\nThree<|endoftext|> Four.")
    assert list(data.read_stories(path)) == [("One.\nStill one.", None), ("Two.", None), ("Three", None), ("Four.", None)]


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz"])
def test_a_jsonl_file_gives_each_line_s_text_and_split(tmp_path, name):
    lines = [{"text": "One.\nStill one."}, {"text": "Two.", "split": "valid"}, {"text": "Three \u26f5.", "split": "train", "id": 3}]
    path = put(tmp_path / name, "\n\n".join(map(json.dumps, lines)))
    assert list(data.read_stories(path)) == [("One.\nStill one.", None), ("Two.", "valid"), ("Three \u26f5.", "train")]


def test_quotes_become_plain_and_blank_lines_go(tmp_path):
    path = put(tmp_path / "s.txt", "\u201cHi,\u201d she said. \n \n  \u2018It\u2019s me.\u2019\n")
    assert list(data.read_stories(path)) == [("\"Hi,\" she said.\n'It's me.'", None)]


@pytest.mark.parametrize("name", ["s.txt.gz", "s.jsonl.gz"])
def test_stories_are_read_one_at_a_time(tmp_path, name):
    """The end of this file is missing, so whoever reads all of it first gets nothing."""
    draw = random.Random(0)
    stories = [f"Story {number}: {draw.randbytes(500).hex()}" for number in range(1000)]
    content = "\n".join(json.dumps({"text": text}) for text in stories) if "jsonl" in name else "\n<|endoftext|>\n".join(stories)
    path = put(tmp_path / name, content)
    path.write_bytes(path.read_bytes()[:-1000])
    reading = data.read_stories(path)
    assert [next(reading)[0] for _ in range(3)] == stories[:3]
    assert "cannot read" in problem(path)


@pytest.mark.parametrize("name", ["s.txt", "s.txt.gz", "s.jsonl", "s.jsonl.gz"])
@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xfe", b"\0\0\0\0"], ids=["empty", "blank", "png", "zeros"]
)
def test_a_file_without_stories_is_a_problem(tmp_path, name, content):
    problem(put(tmp_path / name, content))


@pytest.mark.parametrize(
    "line",
    ["not json", '{"text": 1}', '{"story": "x"}', '["text"]', '"text"', "null", '{"text": "x"', '{"text": null}', "[" * 10**5],
    ids=lambda line: ascii(line[:20]),
)
def test_a_bad_json_line_is_a_problem_that_names_the_line(tmp_path, line):
    path = put(tmp_path / "s.jsonl", '{"text": "fine"}\n' + line + "\n")
    assert "line 2 of" in problem(path)


def test_damaged_gzip_is_a_problem(tmp_path):
    whole = gzip.compress(random.Random(0).randbytes(5000).hex().encode())
    path = tmp_path / "s.txt.gz"
    for content in whole[:-20], whole[:5], b"", b"no gzip at all", whole[:-8] + bytes(8), whole[:10] + b"\xff" * 9 + whole[19:]:
        path.write_bytes(content)
        problem(path)


def test_a_file_that_is_not_there_or_of_another_kind_is_a_problem(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    for name in "none.txt", "folder.txt", "stories.csv", "stories", "stories.zip", ".gz":
        problem(tmp_path / name)


# ---- token files


def test_a_token_file_holds_each_story_closed_by_end(tmp_path):
    stories = ["One day.", "It said <|endoftext|>.", "caf\u00e9 \U0001f600"]
    counts = data.write_tokens(iter(stories), tmp_path / "x.bin")
    tokens = np.fromfile(tmp_path / "x.bin", dtype=np.uint16)
    assert tokens.tolist() == [token for text in stories for token in [*data.encode(text), 4095]]
    assert list(counts) == [3, len(tokens), 8 + 22 + 10]
    assert data.split_stories(tokens) == [[*data.encode(text), 4095] for text in stories]


def test_token_files_are_read_from_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    for content in None, b"":
        if content is not None:
            (tmp_path / "train.bin").write_bytes(content)
        with pytest.raises(data.Problem, match="train.bin"):
            data.load_tokens("train")
    data.write_tokens(["Hello."], tmp_path / "train.bin")
    assert data.load_tokens("train").tolist() == [*data.encode("Hello."), 4095]


def test_half_a_surrogate_pair_is_written_as_a_replacement(tmp_path):
    path = put(tmp_path / "s.jsonl", '{"text": "a \\ud83d b"}\n')
    data.write_tokens((text for text, _ in data.read_stories(path)), tmp_path / "x.bin")
    assert data.decode(np.fromfile(tmp_path / "x.bin", dtype=np.uint16).tolist()) == "a \ufffd b"


def test_a_full_disk_leaves_the_old_file_whole(tmp_path):
    old, path = b"old" * 100, tmp_path / "x.bin"
    path.write_bytes(old)
    writers = [lambda: data.write_tokens(["a story "] * 5000, path), lambda: data.write_whole(path, bytes(50_000))]
    for write in writers:
        with disk_of(20_000), pytest.raises(data.Problem, match="cannot write .*x.bin"):
            write()
        assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_stories_that_break_off_leave_the_old_file_whole(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    stories = (text for text, _ in data.read_stories(put(tmp_path / "s.jsonl", '{"text": "fine"}\n' * 1500 + "bad")))
    with pytest.raises(data.Problem, match="line 1501"):
        data.write_tokens(stories, path)
    assert path.read_bytes() == b"old" and not list(tmp_path.glob("*.part"))


def test_writing_below_a_file_is_a_problem(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for write in lambda path: data.write_whole(path, b"x"), lambda path: data.write_tokens(["x"], path):
        with pytest.raises(data.Problem, match="cannot write"):
            write(tmp_path / "file" / "x.bin")


# ---- the script


def script(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, args)])
    data.main()


def test_the_script_encodes_local_stories_by_their_split(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path / "data")
    lines = [{"text": "One."}, {"text": "Two.", "split": "valid"}, {"text": "Three.", "split": "train"}]
    script(monkeypatch, put(tmp_path / "s.jsonl.gz", "\n".join(map(json.dumps, lines))))
    read = lambda name: [data.decode(story) for story in data.split_stories(data.load_tokens(name))]
    assert (read("train"), read("valid")) == (["One.", "Three."], ["Two."])
    script(monkeypatch, put(tmp_path / "a.txt", "Four."), put(tmp_path / "b.txt", "Five."), "--valid", put(tmp_path / "c.txt", "Six."))
    assert (read("train"), read("valid")) == (["Four.", "Five."], ["Six."])
    script(monkeypatch, tmp_path / "s.jsonl.gz", "--valid", tmp_path / "c.txt")
    assert (read("train"), read("valid")) == (["One.", "Three."], ["Six."])


def test_the_script_wants_stories_to_measure_on(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path / "data")
    with pytest.raises(data.Problem, match="--valid FILE"):
        script(monkeypatch, put(tmp_path / "s.txt", "One."))
    with pytest.raises(data.Problem, match="--valid goes with"):
        script(monkeypatch, "--valid", tmp_path / "s.txt")


# ---- what is asked for


def test_the_instruction_spells_the_words():
    assert data.instruction(("rain", "cake", "jump")) == "Write a story with the words rain, cake and jump.\n"


def test_the_word_lists_are_large_plain_and_share_no_word():
    words = [word for kind in ("nouns", "verbs", "adjectives") for word in data.read_words(kind)]
    assert len(words) >= 600 and len(set(words)) == len(words)
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_no_triple_is_asked_for_twice_in_any_order():
    asks = data.load_asks() + data.load_instructions()
    assert len(data.load_asks()) >= 2000 and len(data.load_instructions()) == 200
    assert len({tuple(sorted(words)) for words in asks}) == len(asks)
    assert tuple(sorted(data.DEMO)) not in {tuple(sorted(words)) for words in asks}


def test_every_ask_holds_a_noun_a_verb_and_an_adjective_in_any_order():
    kind_of = {word: kind for kind in ("nouns", "verbs", "adjectives") for word in data.read_words(kind)}
    orders = [tuple(kind_of[word] for word in words) for words in data.load_asks() + data.load_instructions()]
    assert {tuple(sorted(order)) for order in orders} == {("adjectives", "nouns", "verbs")}
    assert len(set(orders)) == 6


@pytest.mark.parametrize("read, name", [(data.load_asks, "asks-training.txt"), (lambda: data.read_words("nouns"), "nouns.txt")])
def test_a_list_that_is_missing_or_not_text_is_a_problem(tmp_path, monkeypatch, read, name):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    for make in lambda path: None, lambda path: path.write_bytes(b"\xff\xfe\x00"):
        make(tmp_path / name)
        with pytest.raises(data.Problem, match=f"{name}.*git checkout data"):
            read()


def test_an_ask_that_is_not_three_words_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    (tmp_path / "asks-held-out.txt").write_text("kite river brave\nkite river\n")
    with pytest.raises(data.Problem, match="line 2 of .*asks-held-out.txt is not three words"):
        data.load_instructions()


def test_drawing_takes_each_triple_once_and_never_the_demo(monkeypatch):
    lists = {"nouns": ["rain", "dog"], "verbs": ["jump"], "adjectives": ["cake", "red"]}
    monkeypatch.setattr(data, "read_words", lists.get)
    wanted = [["cake", "dog", "jump"], ["dog", "jump", "red"], ["jump", "rain", "red"]]  # all but rain, jump, cake
    for seed in range(10):
        training, held_out = data.draw_asks(2, 1, seed)
        assert len(training) == 2 and sorted(sorted(words) for words in training + held_out) == wanted


def test_lists_that_are_too_short_for_so_many_asks_are_a_problem(monkeypatch):
    monkeypatch.setattr(data, "read_words", lambda kind: [f"{kind}-{number}" for number in range(10)])
    assert len(data.draw_asks(400, 200)[0]) == 400
    with pytest.raises(data.Problem, match="too short for 1001 asks"):
        data.draw_asks(801, 200)


def test_the_shipped_asks_are_those_drawn_from_the_word_lists():
    assert data.draw_asks(4000, 200) == (data.load_asks(), data.load_instructions())


def test_the_shipped_plain_stories_are_64():
    assert len(list(data.read_stories(data.FOLDER / "plain.txt"))) == 64


def test_a_tokenizer_is_not_replaced_where_there_is_nothing_to_measure_on(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("A story.")
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "train_tokenizer", lambda _: pytest.fail("the tokenizer was touched"))
    monkeypatch.setattr(sys, "argv", ["data.py", str(tmp_path / "mine.txt"), "--train-tokenizer"])
    with pytest.raises(data.Problem, match="--valid FILE"):
        data.main()


def test_token_files_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("A story.")
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    encode_mine = lambda *flags: script(monkeypatch, tmp_path / "mine.txt", "--valid", tmp_path / "mine.txt", *flags)
    encode_mine()
    assert data.load_tokens("train")[-1] == data.END
    monkeypatch.setattr(data, "tokenizer_hash", lambda: "another")
    with pytest.raises(data.Problem, match="train.bin was encoded with another tokenizer"):
        data.load_tokens("train")
    monkeypatch.setattr(data, "train_tokenizer", lambda _: None)
    monkeypatch.setattr(data, "write_tokens", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # stopped between the new tokenizer and the new files
        encode_mine("--train-tokenizer")
    with pytest.raises(data.Problem, match="train.bin was encoded with another tokenizer"):
        data.load_tokens("train")


def test_a_file_that_cannot_be_read_leaves_both_token_files_as_they_were(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("A story.")
    (tmp_path / "broken.jsonl").write_text('{"text": "Another story."}\nnot json\n')
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    script(monkeypatch, tmp_path / "mine.txt", "--valid", tmp_path / "mine.txt")
    before = [(tmp_path / f"{split}.bin").read_bytes() for split in ("valid", "train")]
    (tmp_path / "other.txt").write_text("Yet another.")
    with pytest.raises(data.Problem, match="line 2 of"):
        script(monkeypatch, tmp_path / "broken.jsonl", "--valid", tmp_path / "other.txt")
    assert [(tmp_path / f"{split}.bin").read_bytes() for split in ("valid", "train")] == before


@pytest.mark.parametrize("content", [b"\x05\x00\xff\x0f\x07", b"\x05\x00\x06\x00", b"\x05"], ids=["cut", "endless", "byte"])
def test_a_damaged_token_file_is_a_problem_or_read_up_to_its_last_end(tmp_path, monkeypatch, content):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    (tmp_path / "train.bin").write_bytes(content)
    if content.endswith(b"\x07"):
        assert data.load_tokens("train").tolist() == [5, data.END]
    else:
        with pytest.raises(data.Problem):
            data.load_tokens("train")
