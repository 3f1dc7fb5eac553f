"""Augment as a whole: a pure function of its seed, alike on ranks and frames, true to its settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cumulant.data.augment import Augment
from cumulant.data.augment_draws import crop_sides, draws, erasing, part, rows
from cumulant.data.augmentation import DEIT, GEOMETRIC, OPERATION, PRESETS, RANDAUGMENT, SMALL_DATA, VIDEO, Augmentation

SIDE, CLASSES = 16, 5
MEAN, STD = (0.48, 0.46, 0.41), (0.23, 0.22, 0.225)
CPU = torch.device("cpu")

seeds = st.integers(0, 2**63 - 1)
some_settings = st.builds(
    Augmentation,
    crop_scale=st.sampled_from([(1.0, 1.0), (0.08, 1.0)]),
    flip=st.sampled_from([0.0, 0.5]),
    shift=st.integers(0, 2),
    randaugment_ops=st.integers(0, 3),
    randaugment_prob=st.sampled_from([0.5, 1.0]),
    randaugment_std=st.sampled_from([0.0, 0.5, float("inf")]),
    jitter=st.sampled_from([(0.0, 0.0, 0.0, 0.0), (0.4, 0.4, 0.4, 0.1)]),
    erase=st.sampled_from([0.0, 0.5]),
    mixup=st.sampled_from([0.0, 0.8]),
    cutmix=st.sampled_from([0.0, 1.0]),
    mix_prob=st.sampled_from([0.5, 1.0]),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)


def augment(parts, size=SIDE, **options):
    return Augment(parts, size=size, classes=CLASSES, mean=MEAN, std=STD, **options)


def batch(count=8, frames=None, side=SIDE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, side, side) if frames is None else (count, 3, frames, side, side)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return pixels, torch.randint(0, CLASSES, (count,), generator=generator)


def normalised(pixels):
    mean, std = (torch.tensor(v).view(3, *[1] * (pixels.dim() - 2)) for v in (MEAN, STD))
    return (pixels / 255 - mean) / std


@settings(max_examples=15)
@given(parts=some_settings, seed=seeds)
def test_the_seed_decides_and_the_global_generator_is_left_alone(parts, seed):
    step, (pixels, labels) = augment(parts), batch()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    x, targets = step(pixels, labels, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, targets_again = augment(parts)(pixels, labels, seed=seed)
    assert torch.equal(x, again)
    assert torch.equal(targets, targets_again)
    assert x.dtype == targets.dtype == torch.float32
    assert x.isfinite().all()


def test_another_seed_gives_another_result():
    pixels, labels = batch()
    a, b = (augment(DEIT)(pixels, labels, seed=seed)[0] for seed in (1, 2))
    assert (a != b).flatten(1).any(1).all()


@settings(max_examples=15)
@given(parts=some_settings, seed=seeds, world=st.sampled_from([2, 4]))
def test_ranks_together_give_what_one_process_gives(parts, seed, world):
    step, (pixels, labels) = augment(parts), batch()
    x, targets = step(pixels, labels, seed=seed)
    slices = zip(pixels.chunk(world), labels.chunk(world), strict=True)
    ranks = [step(*data, seed=seed, rank=rank, world=world) for rank, data in enumerate(slices)]
    torch.testing.assert_close(torch.cat([r[0] for r in ranks]), x, rtol=0, atol=1e-5)
    assert torch.equal(torch.cat([r[1] for r in ranks]), targets)


@settings(max_examples=15)
@given(parts=some_settings, seed=seeds, smoothing=st.sampled_from([0.0, 0.1]))
def test_targets_are_distributions(parts, seed, smoothing):
    _, targets = augment(parts, label_smoothing=smoothing)(*batch(), seed=seed)
    assert targets.min() >= 0
    torch.testing.assert_close(targets.sum(1), torch.ones(8), rtol=0, atol=1e-6)


@settings(max_examples=15)
@given(parts=some_settings, seed=seeds)
def test_a_clip_of_equal_frames_stays_one(parts, seed):
    pixels, labels = batch()
    x, _ = augment(parts)(pixels.unsqueeze(2).expand(-1, -1, 3, -1, -1), labels, seed=seed)
    assert x.shape == (8, 3, 3, SIDE, SIDE)
    assert torch.equal(x[:, :, 0], x[:, :, 1])
    assert torch.equal(x[:, :, 0], x[:, :, 2])


def test_every_frame_of_a_clip_moves_and_mixes_as_an_image_with_that_seed_would():
    parts = replace(DEIT, randaugment_choices=(*GEOMETRIC, "brightness", "invert", "sharpness"))
    pixels, labels = batch(frames=3)
    clip, clip_targets = augment(parts)(pixels, labels, seed=5)
    for frame in range(3):
        image, targets = augment(parts)(pixels[:, :, frame], labels, seed=5)
        torch.testing.assert_close(clip[:, :, frame], image, rtol=0, atol=1e-5)
        assert torch.equal(targets, clip_targets)


def test_with_everything_off_pixels_are_normalised_and_no_more():
    pixels, labels = batch()
    x, targets = augment(Augmentation())(pixels, labels, seed=3)
    torch.testing.assert_close(x, normalised(pixels), rtol=0, atol=1e-6)
    assert torch.equal(targets, torch.nn.functional.one_hot(labels, CLASSES).float())


def test_probabilities_of_zero_leave_pixels_alone():
    parts = Augmentation(randaugment_ops=2, randaugment_prob=0.0, mixup=1.0, cutmix=1.0, mix_prob=0.0)
    parts = replace(parts, jitter=(0.5, 0.5, 0.5, 0.0), jitter_prob=0.0)
    pixels, labels = batch()
    x, _ = augment(parts)(pixels, labels, seed=3)
    torch.testing.assert_close(x, normalised(pixels), rtol=0, atol=1e-6)


@given(seed=seeds)
def test_mixup_targets_tell_how_much_of_the_pixels_is_whose(seed):
    pixels = torch.zeros(4, 3, SIDE, SIDE, dtype=torch.uint8)
    pixels[::2] = 255
    labels = torch.tensor([0, 1, 2, 3])
    x, targets = augment(Augmentation(mixup=0.8))(pixels, labels, seed=seed)
    white, black = normalised(pixels)[:2]
    share = ((x - black) / (white - black)).flatten(1)
    torch.testing.assert_close(share, targets[:, [0, 2]].sum(1)[:, None].expand_as(share), rtol=0, atol=1e-5)
    assert (targets[:2, 2:4] == 0).all()  # nothing comes from another pair


@given(seed=seeds)
def test_cutmix_targets_are_the_share_of_the_pixels(seed):
    pixels = torch.zeros(4, 3, SIDE, SIDE, dtype=torch.uint8)
    pixels[::2] = 255
    x, targets = augment(Augmentation(cutmix=1.0))(pixels, torch.tensor([0, 1, 2, 3]), seed=seed)
    white = (x > 0).float()[:, 0].mean((1, 2))
    torch.testing.assert_close(white, targets[:, [0, 2]].sum(1), rtol=0, atol=1e-6)


def test_mixing_draws_both_kinds_at_their_rates():
    step = augment(Augmentation(mixup=1.0, cutmix=1.0, mix_prob=0.75, switch_prob=0.25))
    uniform, _ = step.random(20000, 0, 0, 1, CPU)
    own, cut, box = draws(uniform, step.settings, step.constants(CPU), (SIDE, SIDE), SIDE).mix
    assert cut.float().mean() == pytest.approx(0.75 * 0.25, abs=0.01)
    assert (own == 1).float().mean() == pytest.approx(0.25, abs=0.01)
    assert own[own < 1].mean() == pytest.approx(0.5, abs=0.01)
    assert (box[:, ~cut] == 0).logical_or(box[0, ~cut] == box[1, ~cut]).all()


@given(seed=seeds)
def test_erasing_changes_boxes_and_nothing_else(seed):
    plain = Augmentation(flip=0.5, shift=2, mixup=0.0)
    pixels, labels = batch(32)
    before, _ = augment(plain)(pixels, labels, seed=seed)
    after, _ = augment(replace(plain, erase=0.5))(pixels, labels, seed=seed)
    changed = (after != before).any(1)
    rows_changed, cols_changed = changed.any(2), changed.any(1)
    assert torch.equal(changed, rows_changed[:, :, None] & cols_changed[:, None, :])
    # A third of the area at most, give or take the rounding of the sides.
    assert changed.float().mean((1, 2)).max() < 1 / 3 + 0.1


def test_erasing_draws_boxes_as_set():
    parts = Augmentation(erase=0.25, erase_scale=(0.1, 0.3), erase_ratio=(0.5, 2.0))
    uniform = torch.rand(rows(0), 20000, generator=torch.Generator().manual_seed(0))
    (top, bottom, left, right), start = erasing(part(uniform, "erase"), parts, 64)
    taken = bottom > top
    assert taken.float().mean() == pytest.approx(0.25, abs=0.01)
    tall, wide = (bottom - top)[taken], (right - left)[taken]
    assert 0.09 < (tall * wide / 64**2).min() < 0.12
    assert 0.28 < (tall * wide / 64**2).max() < 0.31
    assert 0.47 < (wide / tall).min() < 0.55
    assert top.min() == left.min() == 0
    assert bottom.max() == right.max() == 64
    assert start.min() >= 0


@pytest.mark.parametrize("source", [(64, 64), (40, 90)])
def test_crops_have_the_area_and_ratio_that_were_set(source):
    parts = Augmentation(crop_scale=(0.2, 0.9))
    uniform = torch.rand(rows(0), 20000, generator=torch.Generator().manual_seed(0))
    tall, wide = crop_sides(part(uniform, "crop"), parts, *source)
    assert (tall <= source[0]).all()
    assert (wide <= source[1]).all()
    area, ratio = tall * wide / (source[0] * source[1]), wide / tall
    assert area.min() == pytest.approx(0.2, abs=0.01)
    assert ratio.min() == pytest.approx(3 / 4, abs=0.01)
    assert ratio.max() == pytest.approx(4 / 3, abs=0.01)
    if source[0] == source[1]:
        assert area.mean() == pytest.approx(0.54, abs=0.02)  # large boxes fit less often: a little under 0.55


def test_a_crop_that_never_fits_becomes_the_largest_one_allowed():
    parts = Augmentation(crop_scale=(0.9, 1.0))
    uniform = torch.rand(rows(0), 50, generator=torch.Generator().manual_seed(0))
    tall, wide = crop_sides(part(uniform, "crop"), parts, 10, 100)
    assert (tall == 10).all()
    torch.testing.assert_close(wide, torch.full((50,), 40 / 3))


def test_randaugment_draws_every_operation_equally_and_takes_half():
    step = augment(Augmentation(randaugment_ops=2))
    uniform, _ = step.random(30000, 0, 0, 1, CPU)
    operations, values = draws(uniform, step.settings, step.constants(CPU), (SIDE, SIDE), SIDE).operations
    counts = torch.bincount(operations.flatten(), minlength=len(RANDAUGMENT) + 1) / operations.numel()
    assert counts[0] == pytest.approx(0.5, abs=0.01)
    torch.testing.assert_close(counts[1:], torch.full((15,), 1 / 30), rtol=0, atol=0.004)
    angles = values[operations == OPERATION["rotate"]]
    assert angles.abs().mean() == pytest.approx(27, abs=0.2)
    assert angles.abs().std() == pytest.approx(1.5, abs=0.2)  # cut off at 30
    assert (angles > 0).float().mean() == pytest.approx(0.5, abs=0.05)


def test_shifts_repeat_the_border_and_each_image_has_its_own():
    pixels, labels = batch(64)
    x, _ = augment(Augmentation(shift=1))(pixels, labels, seed=0)
    padded = torch.nn.functional.pad(normalised(pixels), (1,) * 4, mode="replicate")
    crops = torch.stack([padded[..., i : i + SIDE, j : j + SIDE] for i in range(3) for j in range(3)])
    matches = ((crops - x).abs() < 1e-3).flatten(2).all(-1)
    assert (matches.sum(0) == 1).all()
    assert matches.any(1).all()


def test_flips_mirror_half_of_the_images():
    pixels, labels = batch(64)
    x, _ = augment(Augmentation(flip=0.5))(pixels, labels, seed=0)
    plain = normalised(pixels)
    same = ((x - plain).abs() < 1e-3).flatten(1).all(1)
    mirrored = ((x - plain.flip(-1)).abs() < 1e-3).flatten(1).all(1)
    assert torch.equal(same, ~mirrored)
    assert 16 < same.sum() < 48


def test_switching_a_part_on_leaves_the_draws_of_the_others():
    def view(parts):
        step = augment(parts)
        uniform, _ = step.random(8, 1, 0, 1, CPU)
        return draws(uniform, parts, step.constants(CPU), (SIDE, SIDE), SIDE).view

    plain = Augmentation(flip=0.5, crop_scale=(0.3, 1.0))
    assert torch.equal(view(plain), view(replace(plain, erase=0.5, mixup=1.0, jitter=(0.4, 0.0, 0.0, 0.0))))


def test_a_sample_is_as_if_it_were_alone():
    pixels, labels = batch()
    parts = replace(DEIT, mixup=0.0, cutmix=0.0)
    x, _ = augment(parts)(pixels, labels, seed=4)
    other = pixels.clone()
    other[3] = 255 - other[3]
    y, _ = augment(parts)(other, labels, seed=4)
    rest = [i for i in range(8) if i != 3]
    assert torch.equal(x[rest], y[rest])
    assert not torch.equal(x[3], y[3])


@pytest.mark.parametrize(("name", "frames"), [("deit", None), ("video", 2)])
def test_the_step_is_one_graph_with_the_same_result(name, frames):
    pixels, labels = batch(frames=frames)
    step = augment(PRESETS[name], label_smoothing=0.1)
    uniform, noise = step.random(8, 3, 0, 1, CPU)
    # aot_eager: traces the whole graph as every compiler backend sees it, without the minute of code generation.
    graph = torch.compile(step.transform, fullgraph=True, backend="aot_eager")
    expected = step(pixels, labels, seed=3)
    result = graph(pixels, labels, uniform, noise, step.constants(CPU))
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_evaluation_normalises_frames_of_the_right_size_and_changes_nothing_else():
    for pixels in (batch()[0], batch(frames=2)[0]):
        step = augment(DEIT)
        torch.testing.assert_close(step.evaluate(pixels), normalised(pixels), rtol=0, atol=1e-6)
        assert torch.equal(step.evaluate(pixels), step.evaluate(pixels))


@pytest.mark.parametrize(("shape", "crop"), [((30, 41), 0.875), ((41, 30), 1.0), ((18, 18), 0.875), ((9, 12), 1.0)])
def test_evaluation_resizes_and_cuts_the_centre_as_pillow_does(shape, crop):
    y, x = np.mgrid[: shape[0], : shape[1]]
    image = np.stack([5 * y + x, 3 * x + y, 128 + 60 * np.sin(x / 4)], -1).clip(0, 255).astype(np.uint8)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    result = augment(Augmentation(eval_crop=crop)).evaluate(pixels)
    short = round(SIDE / crop)
    side = [round(n * short / min(shape)) for n in shape]
    resized = Image.fromarray(image).resize(side[::-1], Image.Resampling.BILINEAR)
    top, left = ((n - SIDE) // 2 for n in side)
    expected = np.array(resized.crop((left, top, left + SIDE, top + SIDE)))
    expected = normalised(torch.from_numpy(expected).permute(2, 0, 1)[None])
    assert (result - expected).abs().max() < 1.01 / 255 / min(STD)  # Pillow gives whole levels


def test_training_without_crop_sees_frames_as_evaluation_does():
    pixels, labels = batch(side=23)
    step = augment(Augmentation())
    assert torch.equal(step(pixels, labels, seed=0)[0], step.evaluate(pixels))


def test_clips_of_grey_images_work_too():
    step = Augment(VIDEO, size=8, classes=2, mean=(0.5,), std=(0.5,))
    pixels = torch.randint(0, 256, (4, 1, 3, 12, 12), dtype=torch.uint8)
    x, _ = step(pixels, torch.tensor([0, 1, 1, 0]), seed=0)
    assert x.shape == (4, 1, 3, 8, 8)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resampling_stays_within_the_levels(mode):
    pixels = torch.randint(0, 2, (8, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)) * 255
    parts = Augmentation(crop_scale=(0.3, 1.0), interpolation=mode)
    x, _ = augment(parts)(pixels, torch.zeros(8, dtype=torch.int64), seed=0)
    low, high = (normalised(torch.full((1, 3, 1, 1), level)) for level in (0, 255))
    assert (x >= low - 1e-5).all()
    assert (x <= high + 1e-5).all()


def test_presets_are_the_published_recipes():
    assert (DEIT.randaugment_ops, DEIT.randaugment_magnitude, DEIT.randaugment_std) == (2, 9.0, 0.5)
    assert (DEIT.mixup, DEIT.cutmix, DEIT.mix_prob, DEIT.switch_prob, DEIT.erase) == (0.8, 1.0, 1.0, 0.5, 0.25)
    assert (DEIT.crop_scale, DEIT.interpolation, DEIT.eval_crop) == ((0.08, 1.0), "bicubic", 0.875)
    assert (SMALL_DATA.mixup, SMALL_DATA.cutmix, SMALL_DATA.mix_prob, SMALL_DATA.erase) == (1.0, 1.0, 0.5, 0.25)
    assert (VIDEO.mixup, VIDEO.cutmix, VIDEO.flip) == (0.8, 1.0, 0.5)


def test_lists_from_a_recipe_file_become_tuples():
    assert Augmentation(crop_scale=[0.3, 1.0]) == Augmentation(crop_scale=(0.3, 1.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(flip=1.5), "flip: got 1.5, expected a probability"),
        (dict(crop_scale=(0.0, 1.0)), r"crop_scale: got \(0.0, 1.0\)"),
        (dict(erase_ratio=(2.0, 1.0)), "erase_ratio"),
        (dict(mixup=-1.0), "mixup: got -1.0"),
        (dict(randaugment_magnitude=11.0), "randaugment_magnitude: got 11.0"),
        (dict(randaugment_choices=("rotate", "blur")), r"randaugment_choices: got \('blur',\), expected names among"),
        (dict(jitter=(0.1, 0.1, 0.1, 0.7)), "jitter"),
        (dict(mixup=float("inf")), "mixup: got inf, expected a finite alpha"),
        (dict(jitter=(float("inf"), 0.0, 0.0, 0.0)), r"jitter: got \(inf"),
        (dict(jitter=0.4), r"jitter: got 0.4, expected \(brightness"),
        (dict(crop_ratio=(1.0, float("inf"))), r"crop_ratio: got \(1.0, inf\)"),
        (dict(crop_scale=(0.5,)), r"crop_scale: got \(0.5,\), expected two numbers"),
        (dict(shift=1.5), "shift: got 1.5, expected a whole number"),
        (dict(interpolation="nearest"), "interpolation: got nearest"),
        (dict(flip="x"), "flip: got 'x', expected a number"),
        (dict(erase=True), "erase: got True, expected a number"),
        (dict(crop_scale=["a", 1.0]), r"crop_scale: got \['a', 1.0\], expected numbers"),
    ],
)
def test_settings_that_make_no_sense_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**wrong)


def test_arguments_that_do_not_fit_are_named():
    pixels, labels = batch()
    step = augment(DEIT)
    with pytest.raises(ValueError, match=r"pixels: got torch.float32 \(8, 3, 16, 16\), expected uint8"):
        step(pixels.float(), labels, seed=0)
    with pytest.raises(ValueError, match="batch: got 7, expected an even number"):
        step(pixels[:7], labels[:7], seed=0)
    with pytest.raises(ValueError, match=r"labels: got \(7,\)"):
        step(pixels, labels[:7], seed=0)
    with pytest.raises(ValueError, match="rank: got 2"):
        step(pixels, labels, seed=0, rank=2, world=2)
    with pytest.raises(ValueError, match="label_smoothing: got 1"):
        augment(DEIT, label_smoothing=1)
    with pytest.raises(ValueError, match="no hue unless there are 3 channels"):
        Augment(Augmentation(jitter=(0.0, 0.0, 0.0, 0.1)), size=8, classes=2, mean=(0.5,), std=(0.5,))
