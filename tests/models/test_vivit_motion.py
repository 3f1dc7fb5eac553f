"""A task that needs time: blobs that move left or right. Both classes hold the same frames, in opposite order."""

import pytest
import torch
import torch.nn.functional as F

from cumulant.models import create_model


def blobs(count, seed, frames=8, size=16):
    """Clips (count, 1, frames, size, size) of a blob that moves to the right at 0.8 to 1.3 pixels a frame."""
    generator = torch.Generator().manual_seed(seed)
    speed, place, height = torch.rand(3, count, 1, generator=generator)
    speed = 0.8 + 0.5 * speed
    x = place * (size - 1 - speed * (frames - 1)) + speed * torch.arange(frames)
    y = 2 + (size - 5) * height.expand(-1, frames)
    across = torch.arange(size) - x[..., None, None]
    down = torch.arange(size)[:, None] - y[..., None, None]
    return torch.exp(-(across**2 + down**2) / 4.5).unsqueeze(1)


def left_and_right(count, seed):
    """Each clip with its time reversal: a model that sees no order gets exactly half of them right."""
    right = blobs(count, seed)
    return torch.cat([right, right.flip(2)]), torch.arange(2).repeat_interleave(count)


def accuracy(variant, attention, steps=100, lr=5e-3):
    """After 100 steps of 32 clips: one to three seconds on one core."""
    torch.manual_seed(0)
    small = {"depth": 1, "embed_dim": 32, "pool": "gap"}
    model = create_model("vivit_nano_patch4x1_16", variant=variant, attention=attention, num_classes=2, **small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for step in range(steps):
        clips, labels = left_and_right(16, seed=step)
        F.cross_entropy(model(clips), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    clips, labels = left_and_right(128, seed=1000)
    with torch.no_grad():
        return (model(clips).argmax(1) == labels).float().mean().item()


@pytest.mark.parametrize(("variant", "attention"), [(1, "cumulant3"), (2, "cumulant2"), (3, "softmax"), (4, "softmax")])
def test_every_variant_learns_the_direction_of_motion(variant, attention):
    assert accuracy(variant, attention) > 0.9


def test_the_frame_average_cannot_learn_it():
    assert accuracy("average", "softmax") == pytest.approx(0.5, abs=0.05)
