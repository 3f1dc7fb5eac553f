"""The loader: an order fixed by seed and epoch, shared among ranks, the same from memory and from workers."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import frame_numbers, numbered_frames, write_frame_table, write_images

from cumulant.data import Loader, TensorImages, open_source
from cumulant.data.order import epoch_order, mix


def numbered(count, side=4):
    """A part whose image i has the level i everywhere and the label i % 5."""
    images = torch.arange(count).to(torch.uint8)[:, None, None, None].expand(-1, 3, side, side)
    return TensorImages(images.contiguous(), torch.arange(count) % 5)


def run(loader, epoch=0, first_step=0):
    return [tuple(x.clone() for x in batch) for batch in loader.epoch(epoch, first_step)]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def positions(batches):
    return torch.cat([batch[2] for batch in batches]).tolist()


def test_pixels_labels_and_positions_belong_together():
    for pixels, labels, where in Loader(numbered(20), 6, size=4).epoch(0):
        assert pixels.dtype == torch.uint8
        assert pixels.shape == (6, 3, 4, 4)
        assert torch.equal(pixels[:, 0, 0, 0].long(), where)
        assert torch.equal(labels, where % 5)


def test_an_epoch_shows_every_item_once():
    loader = Loader(numbered(24), 6, size=4)
    assert len(loader) == 4
    assert sorted(positions(run(loader))) == list(range(24))


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return positions(run(Loader(numbered(30), 10, size=4, seed=seed), epoch))

    torch.manual_seed(1)
    first = order(3, 5)
    torch.manual_seed(2)
    assert order(3, 5) == first
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_epochs_may_be_asked_for_in_any_order():
    loader = Loader(numbered(30), 10, size=4)
    later = run(loader, 7)
    run(loader, 2)
    assert same(run(loader, 7), later)


@pytest.mark.parametrize("in_memory", [True, False])
def test_starting_in_the_middle_gives_the_rest_of_the_epoch(in_memory):
    loader = Loader(numbered(40), 8, size=4, in_memory=in_memory, workers=0)
    whole = run(loader, 1)
    for first_step in range(6):
        assert same(run(loader, 1, first_step), whole[first_step:])


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_see_what_one_process_sees(world, in_memory):
    options = dict(size=4, seed=1, repeats=2, in_memory=in_memory, workers=0)
    alone = run(Loader(numbered(40), 16, **options))
    shares = [run(Loader(numbered(40), 16, rank=rank, world=world, **options)) for rank in range(world)]
    together = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*shares, strict=True)]
    assert same(together, alone)
    assert all(len(step[0]) == 16 // world for share in shares for step in share)


def test_the_last_batch_is_dropped_or_kept():
    assert [len(batch[0]) for batch in run(Loader(numbered(22), 8, size=4))] == [8, 8]
    loader = Loader(numbered(22), 8, size=4, drop_last=False)
    assert len(loader) == 3
    assert [len(batch[0]) for batch in run(loader)] == [8, 8, 6]


def test_a_small_last_batch_gives_every_rank_a_step():
    shares = [run(Loader(numbered(9), 8, size=4, drop_last=False, shuffle=False, rank=r, world=2)) for r in range(2)]
    assert [[len(batch[0]) for batch in share] for share in shares] == [[4, 0], [4, 1]]


def test_without_shuffling_items_come_in_order():
    assert positions(run(Loader(numbered(10), 4, size=4, shuffle=False, drop_last=False))) == list(range(10))


def test_repeats_put_copies_into_one_batch_but_never_side_by_side():
    batches = run(Loader(numbered(60), 12, size=4, repeats=3))
    assert len(batches) == 5
    for _, _, where in batches:
        assert where.unique(return_counts=True)[1].tolist() == [3] * 4
        assert (where[1:] != where[:-1]).all()
    assert len(set(positions(batches))) == 20  # no item in two batches


@given(items=st.integers(1, 60), batch=st.integers(1, 20), repeats=st.integers(1, 5), seed=st.integers(0, 9))
def test_an_epoch_has_the_same_number_of_slots_whatever_the_repeats(items, batch, repeats, seed):
    order, seeds = epoch_order(items, batch, seed=seed, epoch=0, shuffle=True, repeats=repeats, drop_last=False)
    assert len(order) == len(seeds) == items
    assert np.bincount(order, minlength=items).max() <= repeats


def test_mixed_seeds_differ_and_are_not_negative():
    seeds = [mix(a, b, np.arange(100)) for a, b in itertools.product(range(-2, 3), range(5))]
    every = np.concatenate(seeds)
    assert len(np.unique(every)) == len(every)
    assert every.min() >= 0
    assert abs(np.mean(every % 2) - 0.5) < 0.03


def test_worker_processes_give_the_same_batches_as_memory(tmp_path):
    part = open_source(write_images(tmp_path, train=150, side=12)).train
    options = dict(size=8, seed=2, repeats=2)
    kept = Loader(part, 70, in_memory=True, workers=0, **options)
    streamed = Loader(part, 70, in_memory=False, workers=2, **options)
    assert (kept.in_memory, streamed.in_memory) == (True, False)
    for epoch, first_step in ((0, 0), (1, 1), (1, 0)):
        assert same(run(streamed, epoch, first_step), run(kept, epoch, first_step))
    filled = Loader(part, 70, in_memory=True, workers=2, **options)
    assert same(run(filled, 1), run(kept, 1))


def test_an_epoch_left_early_does_not_spoil_the_next(tmp_path):
    part = open_source(write_images(tmp_path, train=60)).train
    streamed = Loader(part, 6, size=8, in_memory=False, workers=1)
    for _ in streamed.epoch(0):
        break
    assert same(run(streamed, 1), run(Loader(part, 6, size=8, in_memory=True), 1))


def test_a_streamed_epoch_ends_when_another_begins():
    loader = Loader(numbered(20), 5, size=4, in_memory=False, workers=0)
    first = loader.epoch(0)
    next(first)
    next(loader.epoch(1))
    with pytest.raises(RuntimeError, match="a later one of the same loader was begun"):
        next(first)


def test_an_ended_epoch_that_is_asked_late_leaves_the_running_one_alone():
    loader = Loader(numbered(20), 5, size=4, in_memory=False, workers=1)
    expected = run(loader, 1)
    ended, running = loader.epoch(0), loader.epoch(1)
    batches = [next(running)]
    with pytest.raises(RuntimeError, match="a later one of the same loader was begun"):
        next(ended)
    assert same([*batches, *running], expected)


@pytest.mark.parametrize(("in_memory", "workers"), [(True, 0), (True, 1), (False, 0), (False, 1)])
def test_loading_leaves_the_global_random_state_alone(in_memory, workers):
    before = torch.get_rng_state()
    run(Loader(numbered(20), 5, size=4, in_memory=in_memory, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


def videos(folder):
    """Four training videos of different lengths, two test videos."""
    clips = [numbered_frames(count) for count in (9, 5, 12, 3)]
    write_frame_table(folder / "train.parquet", clips, [0, 1, 0, 1])
    write_frame_table(folder / "test.parquet", clips[:2], [0, 1])
    return open_source(folder, frames=4, stride=1, views=2)


def test_clips_from_memory_and_from_workers_are_the_same_and_start_anew_each_epoch(tmp_path):
    part = videos(tmp_path).train
    kept, streamed = (Loader(part, 2, size=8, in_memory=kind, workers=0, seed=3) for kind in (True, False))
    starts = set()
    for epoch in range(12):
        batches = run(kept, epoch)
        assert same(batches, run(streamed, epoch))
        assert batches[0][0].shape == (2, 3, 4, 8, 8)
        starts |= {
            (where, frame_numbers(clip)[0])
            for pixels, _, w in batches
            for clip, where in zip(pixels, w.tolist(), strict=True)
        }
    assert {start for where, start in starts if where == 2} > {0, 8}
    assert {start for where, start in starts if where == 3} == {0}


def test_copies_of_a_clip_start_at_different_places(tmp_path):
    part = videos(tmp_path).train
    pairs = [
        [frame_numbers(clip)[0] for clip in pixels]
        for epoch in range(20)
        for pixels, _, where in Loader(part, 2, size=8, repeats=2, seed=1).epoch(epoch)
        if where[0] == where[1] == 2
    ]
    assert any(a != b for a, b in pairs)


def test_the_views_of_test_videos_are_the_same_from_memory_and_from_workers(tmp_path):
    part = videos(tmp_path).test
    kept, streamed = (
        run(Loader(part, 3, size=8, shuffle=False, drop_last=False, in_memory=kind, workers=0))
        for kind in (True, False)
    )
    assert same(kept, streamed)
    assert [frame_numbers(clip)[0] for pixels, _, _ in kept for clip in pixels] == [0, 5, 0, 1]


def test_training_clips_without_shuffling_come_from_the_middle(tmp_path):
    part = videos(tmp_path).train
    kept, streamed = (run(Loader(part, 4, size=8, shuffle=False, in_memory=kind, workers=0)) for kind in (True, False))
    assert same(kept, streamed)
    assert frame_numbers(kept[0][0][0]) == [3, 4, 5, 6]


def test_what_does_not_fit_is_streamed(monkeypatch):
    for allowed, kept in ((20 * 3 * 16, True), (20 * 3 * 16 - 1, False)):
        monkeypatch.setattr("cumulant.data.loader.allowed_bytes", lambda device, allowed=allowed: allowed)
        assert Loader(numbered(20), 5, size=4, workers=0).in_memory is kept


def test_decoding_shows_a_progress_bar_when_asked(capsys, monkeypatch):
    import tqdm

    monkeypatch.setattr(tqdm, "tqdm", lambda **options: bar(**{**options, "delay": 0}))
    bar = tqdm.std.tqdm
    Loader(numbered(20), 5, size=8, progress=True)
    assert "decoding: 100%" in capsys.readouterr().err
    Loader(numbered(20), 5, size=8, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(size=0), "size must be at least 1, got 0"),
        (dict(repeats=0), "repeats must be at least 1, got 0"),
        (dict(rank=2, world=2), "rank must be between 0 and world - 1 = 1, got 2"),
        (dict(batch_size=5, world=2), "batch_size must be a multiple of world=2, got 5"),
        (dict(batch_size=2.5), "batch_size must be a whole number, at least 1, got 2.5"),
        (dict(repeats=3, shuffle=False), "repeats must be 1 without shuffle, got 3"),
        (dict(in_memory="no"), "in_memory must be True, False or \"auto\", got 'no'"),
        (dict(max_bad=-1), "max_bad must be None or a whole number of at least 0, got -1"),
        (dict(workers=-1), "workers must be None or a whole number of at least 0, got -1"),
        (dict(seed=2**64), "seed must fit into 64 bits"),
        (dict(batch_size=50), r"batch_size 50 is larger than the part \(20 items\)"),
    ],
)
def test_wrong_arguments_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        Loader(numbered(20), **{"batch_size": 4, "size": 4, **options})


@pytest.mark.parametrize("first_step", [-1, 6])
def test_a_step_outside_the_epoch_is_told_at_once(first_step):
    with pytest.raises(ValueError, match=f"first_step must be between 0 and 5.*got {first_step}"):
        Loader(numbered(20), 4, size=4).epoch(0, first_step)
