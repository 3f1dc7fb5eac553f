"""What stands beside the weights of a model goes with them: without it a converted model is fed other words."""

import errno
import fnmatch
import json
import re
import shutil
from pathlib import Path

import pytest
from small_models import bert, transformers

from cumulant.conversion import convert, save
from cumulant.conversion.saving import BESIDE

POOLING = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}


def sentence_encoder(folder):
    """A saved encoder with the files of a tokenizer and the modules of a SentenceTransformer."""
    bert().save_pretrained(folder)
    (folder / "vocab.txt").write_text("a\n")
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "../outside"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (folder.parent / "outside").mkdir(exist_ok=True)
    return folder


def converted(folder, out):
    model = transformers().BertModel.from_pretrained(folder)
    convert(model, force=True)
    return save(model, out)


def test_the_pooling_of_a_sentence_encoder_goes_with_it(tmp_path):
    out = converted(sentence_encoder(tmp_path / "encoder"), tmp_path / "out")
    assert json.loads((out / "1_Pooling" / "config.json").read_text()) == POOLING
    assert (out / "modules.json").is_file()


def test_a_module_without_files_needs_no_folder(tmp_path):
    """As the normalization of all-MiniLM-L6-v2: neither the Hub nor a package keeps an empty folder."""
    encoder = sentence_encoder(tmp_path / "encoder")
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Normalize"}]
    (encoder / "modules.json").write_text(json.dumps(modules))
    out = converted(encoder, tmp_path / "out")
    assert (out / "1_Pooling" / "config.json").is_file()
    assert json.loads((out / "modules.json").read_text()) == modules


@pytest.mark.parametrize("stops_at", ["weights", "tokenizer"])
def test_a_save_that_stops_in_the_middle_leaves_what_was_there(tmp_path, monkeypatch, stops_at):
    encoder, out = sentence_encoder(tmp_path / "encoder"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    if stops_at == "weights":
        monkeypatch.setattr("safetensors.torch.save_file", _full)
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", _full, raising=False)
    else:
        monkeypatch.setattr("shutil.copy", _full)
    with pytest.raises(OSError, match="No space left"):
        converted(encoder, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def _full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_model_that_was_saved_in_shards_before_is_not_what_is_loaded(tmp_path):
    out = tmp_path / "out"
    bert().save_pretrained(out, max_shard_size="10KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    converted(sentence_encoder(tmp_path / "encoder"), out)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


def test_no_folder_outside_that_of_the_model_is_taken(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    converted(sentence_encoder(tmp_path / "encoder"), tmp_path / "elsewhere" / "out")
    assert not (tmp_path / "elsewhere" / "outside").exists()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A model that is known by a name of the Hub, the part of it that the cache holds, and what the Hub was asked."""
    there, cache, asked = sentence_encoder(tmp_path / "there"), tmp_path / "cache", []
    cache.mkdir()

    def download(name, local_files_only=False, allow_patterns=()):
        assert name == "me/encoder"
        asked.append(local_files_only)
        if not local_files_only:
            for file in (path for path in there.rglob("*") if path.is_file()):
                relative = file.relative_to(there)
                if any(fnmatch.fnmatch(str(relative), pattern) for pattern in allow_patterns):
                    (cache / relative).parent.mkdir(exist_ok=True)
                    shutil.copy(file, cache / relative)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = transformers().BertModel.from_pretrained(there)
    model.name_or_path = "me/encoder"
    convert(model, force=True)
    return model, asked


def test_a_model_of_the_hub_keeps_its_tokenizer_and_its_modules(hub, tmp_path):
    model, _ = hub
    out = save(model, tmp_path / "out")
    assert (out / "vocab.txt").read_text() == "a\n"
    assert (out / "1_Pooling" / "config.json").is_file()


def test_a_name_that_the_hubs_cache_does_not_know_is_not_asked_for(hub, tmp_path, monkeypatch):
    model, _ = hub
    asked = []

    def nothing(name, local_files_only=False, **_):
        asked.append(local_files_only)
        raise FileNotFoundError(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    save(model, tmp_path / "out")
    assert asked == [True]


def test_without_a_network_what_the_cache_holds_is_taken_and_that_is_said(hub, tmp_path, monkeypatch):
    model, _ = hub
    held = tmp_path / "cache"
    (held / "vocab.txt").write_text("held\n")

    def unreachable(name, local_files_only=False, **_):
        if local_files_only:
            return str(held)
        raise ConnectionError("the Hub does not answer")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.warns(UserWarning, match=r"only what the cache holds of me/encoder .* does not answer"):
        out = save(model, tmp_path / "out")
    assert (out / "vocab.txt").read_text() == "held\n"


def test_every_file_that_a_tokenizer_of_transformers_reads_is_among_them():
    place = Path(transformers().__file__).parent
    names = set()
    for code in (file.read_text(encoding="utf-8") for file in place.rglob("tokenization_*.py")):
        stated = re.search(r"VOCAB_FILES_NAMES\s*(?::[^=]+)?=\s*\{(.*?)\}", code, re.DOTALL)
        names |= set(re.findall(r':\s*"([^"]+)"', stated.group(1))) if stated else set()
    assert len(names) > 10
    assert not [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in BESIDE)]
