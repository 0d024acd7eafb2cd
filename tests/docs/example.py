"""Makes docs/example/play.html and the pictures of the page in README.md and headlens/docs.

python tests/docs/example.py    # trains runs/induction, unless it is there

That of a book is made too if there is runs/book, of `experiment=book data.path=my.txt name=book`.
"""

import io
import json
import platform
import shutil
import subprocess
import sys

import numpy as np
from helpers import REPOSITORY
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

DOCS = REPOSITORY / "docs"
RUNS = REPOSITORY / "runs"
EXAMPLE = DOCS / "example" / "play.html"
TRAIN = ["train.py", "experiment=induction", "seed=2", "wandb=off", "name=induction"]
# Time of each picture of the animation, in milliseconds: the first step stands still, and most
# changes are at the beginning.
TIMES = [1500] + [150] * 42 + [650] * 6 + [3000]
COLOURS = 40
KEPT = (400, 600, 800, 2000)  # steps with weights in the example: before, while and after it learns
TYPED, CONTINUED, SIZE = "JULIET: O Romeo, wh", 11, (820, 840)  # letters, pixels
LEAST_CHANGE = 64  # of 255; smaller changes of the lines are drawn at the end


def run_python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, check=True)


def write_example() -> None:
    """Trains, removes what describes the machine, and draws the page again."""
    run = RUNS / "induction"
    if not (run / "summary.json").exists():
        run_python(*TRAIN)
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text("utf-8").splitlines()]
    lines = [json.dumps(start | {"system": platform.system()}) + "\n" for start in starts]
    (run / "starts.jsonl").write_text("".join(lines), encoding="utf-8")
    for folder in (run / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) not in KEPT:
            shutil.rmtree(folder)
    EXAMPLE.parent.mkdir(exist_ok=True)
    run_python("-m", "scripts.view", "write=runs/induction")
    shutil.copy(run / "play.html", EXAMPLE)


def opened(browser, path, width: int, height: int, link="", motion="reduce") -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark", reduced_motion=motion
    )
    page = context.new_page()
    if motion != "reduce":  # the clock stands still between the pictures
        page.clock.install(time=0)
        page.clock.pause_at(1000)
    page.goto(path.as_uri() + link)
    return page


def save_png(data: bytes, name: str) -> None:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(255, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)


def still(browser, path, link: str, width: int, height: int, name: str) -> None:
    page = opened(browser, path, width, height, link)
    expect(page.locator("html")).to_have_attribute("data-ready", "1")
    page.wait_for_timeout(1000)
    shown = page.locator("#tab-heads").bounding_box()
    end = min(height, round(shown["y"] + shown["height"]))
    save_png(page.screenshot(clip={"x": 0, "y": 0, "width": width, "height": end}), name)


def animation(browser, name: str) -> None:
    """The first screen while it plays, from the sentence to the line of the loss."""
    page = opened(browser, EXAMPLE, 760, 600, motion="no-preference")
    page.clock.run_for(50)
    expect(page.locator("html")).to_have_attribute("data-ready", "1")
    top = page.locator("#story-headline").bounding_box()
    bottom = page.locator("#story-time").bounding_box()
    height = bottom["y"] + bottom["height"] - top["y"] + 12
    clip = {"x": 0, "y": top["y"] - 12, "width": 760, "height": height}
    first, copied = (page.locator(f"[data-token='{n}']").bounding_box() for n in (1, 32))
    lines = slice(*(round(y - clip["y"]) for y in (first["y"] + first["height"], copied["y"])))
    images = []
    for time in TIMES[:-1]:
        images.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
        page.clock.run_for(time)
    expect(page.locator("#story-play")).to_have_attribute("aria-label", "play")  # it is over
    images.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
    save_animation(images, TIMES, name, lines)


def typing(browser, path, name: str) -> None:
    """A text is typed, the model continues it, and heads are switched off and on again."""
    page = opened(browser, path, *SIZE)
    expect(page.locator("html")).to_have_attribute("data-ready", "1")
    page.locator("#temperature").evaluate("node => { node.value = 0; }")
    page.locator("#typed").click()
    top = page.locator("#typing").bounding_box()["y"]
    clip = {"x": 0, "y": top, "width": SIZE[0], "height": SIZE[1] - top}
    images, times = [], []

    def picture(time: int) -> None:
        page.wait_for_timeout(150)
        image = page.screenshot(clip=clip)
        images.append(Image.open(io.BytesIO(image)).convert("RGB"))
        times.append(time)

    picture(1000)
    for number, letter in enumerate(TYPED, 1):
        page.keyboard.type(letter)
        expect(page.locator("#story-tokens [data-token]")).to_have_count(number)
        picture(110)
    times[-1] = 1800
    for number in range(len(TYPED) + 1, len(TYPED) + CONTINUED + 1):
        page.locator("#story-next button").first.click()  # the most likely letter
        expect(page.locator("#story-tokens [data-token]")).to_have_count(number)
        picture(110)
    page.mouse.move(0, 0)
    picture(1800)
    page.locator("#story-cards .switch").first.click()
    expect(page.locator("#story-cards .off")).to_have_count(1)
    page.mouse.move(0, 0)
    picture(3500)
    page.locator("#all-on").click()
    expect(page.locator("#story-cards .off")).to_have_count(0)
    picture(2500)
    save_animation(images, times, name)


def save_animation(images: list, times: list, name: str, lines: slice | None = None) -> None:
    """Writes an animated image with few colours. lines: rows of pixels in which small changes are
    drawn at the end."""
    samples = np.concatenate([np.asarray(image) for image in images[::6] + images[-1:]])
    palette = Image.fromarray(samples).quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
    shown, drawn = None, []
    for image in images:
        few = image.quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB")
        pixels = np.asarray(few).astype(int)
        if lines and shown is not None and image is not images[-1]:
            same = np.abs(pixels - shown).max(-1, keepdims=True) < LEAST_CHANGE
            pixels[lines] = np.where(same, shown, pixels)[lines]
        shown = pixels
        drawn.append(Image.fromarray(shown.astype(np.uint8)))
    options = {"lossless": True, "quality": 60, "method": 4, "minimize_size": True}
    drawn[0].save(
        DOCS / name, save_all=True, append_images=drawn[1:], duration=times, loop=0, **options
    )


if __name__ == "__main__":
    write_example()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        animation(browser, "story-induction.webp")
        still(browser, EXAMPLE, "#view=all", 1200, 910, "lens-page.png")
        if (RUNS / "book" / "play.html").exists():
            still(browser, RUNS / "book" / "play.html", "", 900, 1100, "story-book.png")
            typing(browser, RUNS / "book" / "play.html", "typing.webp")
