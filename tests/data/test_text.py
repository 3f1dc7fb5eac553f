"""Texts: characters and bytes, windows that cover every token once, an order that the seed decides, clear refusals."""

import pytest
import torch

from cumulant.data import DataError, TextLoader, open_source
from cumulant.models.vocabulary import Vocabulary


@pytest.fixture
def play(tmp_path):
    file = tmp_path / "play.txt"
    file.write_text("To be, or not to be: that is the quéstion.\r\n" * 40, newline="")
    return file


def written(source, tokens):
    return Vocabulary("".join(source.classes) if len(source.classes) < 200 else "").decode(tokens.tolist())


@pytest.mark.parametrize("tokens", ["chars", "bytes"])
def test_a_file_is_read_as_it_stands_and_its_last_tenth_is_the_test_part(play, tokens):
    source = open_source(play, tokens=tokens, context=16)
    text = written(source, source.train.tokens) + written(source, source.test.tokens)
    assert text == play.read_bytes().decode()
    assert len(source.test.tokens) == pytest.approx(len(text) / 10, abs=8)
    assert len(source.classes) == (256 if tokens == "bytes" else len(set(text)))


def test_bits_of_a_byte_know_how_long_characters_are(play):
    chars, raw = (open_source(play, tokens=tokens, context=16) for tokens in ("chars", "bytes"))
    assert raw.train.bytes_per_token == 1
    assert chars.train.bytes_per_token == pytest.approx(len(raw.train.tokens) / len(chars.train.tokens))


def test_the_windows_of_the_test_part_predict_every_token_once():
    source = open_source("sentences", context=50)
    part = source.test
    loader = TextLoader(part, 8, shuffle=False, drop_last=False)
    inputs, targets, places = (torch.cat(x) for x in zip(*loader.epoch(0), strict=True))
    assert targets.flatten().equal(part.tokens[1 : 1 + len(part) * 50])
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert places.tolist() == list(range(len(part)))


def test_training_windows_depend_on_seed_and_epoch_alone_and_are_shared_among_ranks():
    part = open_source("sentences", context=32).train
    loader = TextLoader(part, 8, seed=3)
    epoch = [batch[0] for batch in loader.epoch(2)]
    later = [batch[0] for batch in TextLoader(part, 8, seed=3).epoch(2, first_step=5)]
    assert all(a.equal(b) for a, b in zip(epoch[5:], later, strict=True))
    assert not epoch[0].equal(next(loader.epoch(1))[0])
    halves = [next(TextLoader(part, 8, seed=3, rank=rank, world=2).epoch(2))[0] for rank in (0, 1)]
    assert torch.cat(halves).equal(epoch[0])


def test_a_folder_has_a_file_for_each_part_or_one_alone(tmp_path, play):
    assert open_source(tmp_path, context=16).identity()["digest"] == open_source(play, context=16).identity()["digest"]
    for part in ("train", "val", "test"):
        (tmp_path / f"{part}.txt").write_text(f"{part} " * 30)
    for given, first in ((None, "val val"), ("test", "test")):
        source = open_source(tmp_path, context=8, test_part=given)
        assert written(source, source.test.tokens).startswith(first)


def test_one_changed_character_is_another_text(play):
    before = open_source(play, context=16).identity()
    play.write_text(play.read_text().replace("not", "nor", 1))
    assert open_source(play, context=16).identity()["digest"] != before["digest"]


def test_what_cannot_be_read_is_told(tmp_path, play):
    with pytest.raises(DataError, match=r"tokens do not make a window of context=5000"):
        open_source(play, context=5000)
    with pytest.raises(ValueError, match=r'tokens must be "chars" or "bytes", got \'words\''):
        open_source(play, tokens="words")
    with pytest.raises(DataError, match=r"digits: tokens has no effect there, got 'bytes'"):
        open_source("digits", tokens="bytes")
    with pytest.raises(DataError, match=r"a text\): label_column has no effect there"):
        open_source(play, label_column="x")
    (tmp_path / "raw.txt").write_bytes(b"\xff\xfe" * 300)
    with pytest.raises(DataError, match=r"is not UTF-8 text.*tokens=bytes"):
        open_source(tmp_path / "raw.txt", context=16)
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"a file; expected the folder that holds the data set, or a text"):
        open_source(tmp_path / "table.csv")
