"""The animated image of a run: the heads of each step, their order and the size of the file."""

import numpy as np
import pytest
import torch
from helpers.pages import GivenModel
from PIL import Image, ImageSequence

from data import get_tokenizer
from headlens import Lens, LensConfig, animation
from headlens.animation import LAST_MILLISECONDS, MILLISECONDS, SIZE, write_animation
from headlens.heatmap import ACCENT
from headlens.prompts import Prompt

YELLOW = (253, 231, 37)  # weight 1


def frames_of(path):
    with Image.open(path) as image:
        pixels = [np.asarray(f.convert("RGB")).astype(int) for f in ImageSequence.Iterator(image)]
    return np.stack(pixels)


def head_with(frame, colour, at_least):
    """Returns which of four heads next to each other has the colour."""
    area = frame[130:, 40:]  # below the texts, right of the labels
    near = (np.abs(area - colour).max(-1) < 60).sum(0)
    counts = [part.sum() for part in np.array_split(near, 4)]
    assert max(counts) > at_least
    return int(np.argmax(counts))


@pytest.mark.parametrize("shown", ["repeated", "text"])
def test_each_frame_shows_a_step_on_the_prompt_of_the_names(tmp_path, shown):
    """At step 10 n, head n is an induction head or attends to the first token, and is outlined. An
    induction head has its name on the repeated sequence."""
    lens = Lens(
        get_tokenizer("byte"),
        LensConfig(every=10, prompts=["text"], repeat_length=4),
        context_length=64,
        max_steps=30,
        folder=tmp_path,
        vocabulary=range(200),
    )
    for step in (0, 10, 20, 30):

        def capture_attention(ids, capture, step=step):
            queries = torch.arange(len(ids))
            uniform = torch.ones(len(ids), len(ids)).tril() / (queries[:, None] + 1)
            weights = uniform.repeat(4, 1, 1)
            keys = (queries - 3).clamp(min=0) if shown == "repeated" else 0 * queries
            share = 1.0 if (ids[0] == 256) == (shown == "repeated") else 0.6
            weights[step // 10] *= 1 - share  # less weight on the other prompt
            weights[step // 10, queries, keys] += share
            capture(0, weights)

        snapshot = lens.snapshot(GivenModel(capture_attention), step)
        assert ("attention/animation" in snapshot.images) == (step == 30)
    path = tmp_path / "timelapse.webp"
    assert snapshot.images["attention/animation"] == path
    frames = frames_of(path)
    for colour, at_least in ((YELLOW, 1000), (ACCENT, 300)):
        assert [head_with(frame, colour, at_least) for frame in frames] == [3, 0, 1, 2]
    with Image.open(path) as image:
        times = []
        for frame in ImageSequence.Iterator(image):
            frame.load()
            times.append(frame.info["duration"])
        assert times == [LAST_MILLISECONDS, *[MILLISECONDS] * 3]
        assert image.info["loop"] == 0  # repeats without end


def test_size_of_the_file_and_of_the_image(tmp_path, monkeypatch):
    """Steps are omitted if there are many or if the file would be too large; never the last."""
    path, prompt = tmp_path / "a.webp", Prompt("1-x", "x", list(range(21)), ["x"] * 21)
    monkeypatch.setattr(animation, "MAX_STEPS", 5)
    codes = list(np.random.default_rng(0).integers(0, 255, (8, 1, 6, 231)).astype(np.uint8))
    write_animation(tmp_path / "one.webp", prompt, codes[-1:], [7], [[]])
    (last,) = frames_of(tmp_path / "one.webp")
    for most, expected in ((animation.MAX_BYTES, 5), (80_000, 3)):
        monkeypatch.setattr(animation, "MAX_BYTES", most)
        write_animation(path, prompt, codes, range(8), [[]] * 8)
        assert path.stat().st_size <= most
        frames = frames_of(path)
        assert len(frames) == expected
        assert np.abs(frames[0] - last).mean() < 2 < np.abs(frames[1] - last).mean()
    rows = [{"layer": 0, "head": 0, "name": "duplicate_token"}] * 4
    for shape in ((1, 1, 1), (48, 25, 36), (12, 12, 2145)):
        write_animation(path, prompt, [np.zeros(shape, np.uint8)], [5], [rows])
        assert all(a <= b for a, b in zip(Image.open(path).size, SIZE, strict=True))
        assert (frames_of(path)[0, 40:100, -12:] > 240).all()  # each name fits
