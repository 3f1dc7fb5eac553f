"""Reviews laid out as sentences of words, and both classifiers on reviews that a word gives away."""

import documents as bench
import pytest
import torch

pytest.importorskip("pyarrow")


def test_sentences_end_at_marks_and_line_breaks():
    assert bench.sentences("It's Good. Very<br /><br />good!? ...") == [["it's", "good"], ["very"], ["good"]]


def test_words_stand_in_the_rows_of_their_sentences_and_unknown_ones_are_left_out():
    ids = bench.laid_out(["a b. zzz. c " + "a " * 30 + ".", ""], {"a": 0, "b": 1, "c": 2})
    grid = ids.unflatten(-1, (bench.SENTENCES, bench.WORDS))
    assert grid[0, 0, :3].tolist() == [0, 1, bench.ABSENT]
    assert grid[0, 1].tolist() == [2] + [0] * 15
    assert (grid[0, 2:] == bench.ABSENT).all()
    assert (ids[1] == bench.ABSENT).all()


def test_embeddings_of_words_that_occur_together_are_alike():
    ids = torch.tensor([[0, 1, -1, -1], [0, 1, 1, -1], [2, 3, -1, -1], [3, 2, 3, -1]])
    a, b, c, d = torch.nn.functional.normalize(bench.embeddings(ids, 4, 2), dim=-1)
    assert a @ b > 0.99
    assert c @ d > 0.99
    assert (a @ c).abs() < 0.01


@pytest.mark.parametrize("setting", bench.SETTINGS)
def test_absent_words_change_nothing(setting):
    torch.manual_seed(0)
    model = bench.Classifier(torch.randn(9, 16), *bench.SETTINGS[setting], classes=2)
    ids = bench.laid_out(["a b c. b"], {"a": 0, "b": 1, "c": 2})
    before = model(ids)
    model.words[-1] = 7.0  # what stands for no word
    torch.testing.assert_close(model(ids), before)


def test_both_learn_reviews_that_a_word_gives_away(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(bench, "SENTENCES", 4)  # of 16, which take four times as long
    for part, count in (("train", 64), ("test", 32)):
        labels = [i % 2 for i in range(count)]
        texts = [f"The film number {i}. It was {('awful', 'lovely')[y]}!" for i, y in enumerate(labels)]
        pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / f"{part}-0.parquet")
    found = bench.documents(tmp_path, seeds=1, epochs=60, size=50, width=4)
    assert set(found) == set(bench.SETTINGS)
    assert all(min(runs) > 0.9 for runs in found.values()), found


def test_a_folder_without_reviews_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no train\*\.parquet and test\*\.parquet in"):
        bench.documents(tmp_path)
