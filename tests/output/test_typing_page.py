"""A text typed into a page, in Chromium: all that the page shows is what the model of a checkpoint
does on it. The model is behind a server, or in the page."""

import contextlib
import itertools
import shutil

import numpy as np
import pytest
from helpers import pages
from helpers.live import RUN, live_command, serving
from helpers.runs import change_tensors, train_in, write_checksums
from playwright.sync_api import expect

from clearhead.models.pretrained import load_pretrained
from clearhead.output.play import write_play_page
from headlens import Reader, read_snapshot

ports = itertools.count(9200, 30)
WORDS = "the dog jumps"


@pytest.fixture(scope="session")
def typed_run(tmp_path_factory):
    """A run with checkpoints of the steps 10 to 40."""
    kept = ("trainer.save_every=10", "trainer.keep=4", "trainer.max_steps=40", "lens.every=10")
    kept += ("trainer.eval_every=0", "optimizer.lr=0.02")
    return train_in(tmp_path_factory.mktemp("typed"), "name=typed", *RUN, *kept)


@pytest.fixture(scope="session")
def reader(typed_run):
    """reader(step) -> what the server should compute."""
    snapshot = read_snapshot(max(typed_run.glob("attention/step_*.npz")))
    prompts = [prompt.token_ids for prompt in snapshot.prompts]

    def at(step):
        found = load_pretrained(str(typed_run / "checkpoints" / f"step_{step:08d}"))
        return Reader(found.model, found.tokenizer, prompts, 32)

    return at


@pytest.fixture(scope="session")
def address(typed_run):
    """The page of the run on a server: another process, as both switch compilation off and on."""
    with live_command(typed_run.parent, next(ports)) as found:
        yield f"{found}run/typed/"


@pytest.fixture(params=["server", "play.html"])
def page(window, typed_run, address, request):
    """The page of the run with the line to type in."""
    wrong = []
    lens = window(reduced_motion="reduce").new_page()
    lens.on("pageerror", lambda error: wrong.append(str(error)))
    lens.on("console", lambda message: wrong.append(message.text))
    lens.goto(address if request.param == "server" else (typed_run / "play.html").as_uri())
    pages.ready(lens)
    yield lens
    lens.close()
    assert [text for text in wrong if "Failed to load resource" not in text] == []


def type_in(lens, text):
    lens.locator("#typed").fill(text)
    expect(lens.locator("#story-tokens [data-token]")).to_have_count(len(text.encode()))


def expects(lens, reading, place=-1):
    """Checks the list of next tokens after a token."""
    items = lens.locator("#story-next li")  # maybe one more: the right token
    for n, label in enumerate(reading.likely.labels[place]):
        expect(items.nth(n).locator("bdi")).to_have_text(f"“{label}”")
        percent = float(items.nth(n).locator("span").inner_text().strip("<\xa0%"))
        assert abs(percent - 100 * reading.likely.probabilities[place][n]) <= 0.6


def codes(lens, layer, head, size):
    places = [[layer, head, query, key] for query in range(size) for key in range(query + 1)]
    frame = pages.state(lens, "frame")
    read = "([frame, places]) => places.map((place) => lens.weight(0, frame, 0, ...place))"
    return 255 * np.sqrt(lens.evaluate(read, [frame, places]))


def go_to(lens, frame):
    slider = lens.locator("#story-step")
    slider.evaluate(
        "(node, n) => { node.value = n; node.dispatchEvent(new Event('input')); }", frame
    )


def test_what_the_model_does_on_a_typed_text(page, reader):
    type_in(page, WORDS)
    reading = reader(40).read(WORDS)
    expects(page, reading)
    expect(page.locator("#story-headline")).to_contain_text(f"“{reading.next.labels[0]}”")
    for layer, head in np.ndindex(2, 2):
        found = codes(page, layer, head, len(WORDS))
        assert np.allclose(found, reading.codes.reshape(4, -1)[2 * layer + head], atol=1.01)
    page.locator("#story-tokens [data-token='4']").click()
    expects(page, reading, 4)
    page.locator("#show-all").click()
    pages.tile(page, 1, 0).click()
    expect(page.locator("#text #prose")).to_have_text(WORDS)
    next_tokens = page.locator("#next li bdi").all_inner_texts()
    assert next_tokens[:5] == [f'"{label}"' for label in reading.likely.labels[4]]


def test_each_kept_checkpoint(page, reader):
    type_in(page, WORDS)
    for frame, step in enumerate((10, 20, 30, 40)):
        go_to(page, frame)
        expect(page.locator("#story-now b")).to_have_text(f"step {step}")
        expects(page, reader(step).read(WORDS))
    go_to(page, 1)
    expect(page.locator("#story-now b")).to_have_text("step 20")
    type_in(page, "a dog")  # the step stays
    expects(page, reader(20).read("a dog"))


def test_heads_that_are_switched_off(page, reader):
    type_in(page, WORDS)
    page.locator("#show-all").click()
    for layer, head, off in ((0, 1, [1]), (1, 0, [1, 2])):
        pages.tile(page, layer, head).click()
        page.locator("#switch-head").click()
        expect(page.locator("#switch-head")).to_have_text("switch on")
        without = reader(40).read(WORDS, off=off)
        found = codes(page, 1, 1, len(WORDS))
        assert np.allclose(found, without.codes.reshape(4, -1)[3], atol=1.01)
    expect(page.locator(".head.off")).to_have_count(2)
    page.locator("#show-story").click()
    expects(page, without)
    was = page.locator("#story-next li small").first.inner_text().removeprefix("was ")
    whole = reader(40).read(WORDS)
    likely = dict(zip(whole.likely.ids[-1], whole.likely.probabilities[-1], strict=True))
    known = likely.get(without.likely.ids[-1][0], min(likely.values()))
    assert abs(float(was.strip("<\xa0%")) - 100 * known) <= 0.6
    type_in(page, "a dog")  # they stay off
    expects(page, reader(40).read("a dog", off=[1, 2]))
    page.locator("#all-on").click()
    expects(page, reader(40).read("a dog"))


def test_the_card_says_what_its_heads_do_on_the_text(page):
    asked = []  # heads that are off in each request to the server

    def note(request):
        if request.method == "POST":
            asked.append(request.post_data_json["off"])

    page.on("request", note)
    type_in(page, WORDS)
    effect = page.locator("#story-cards .effect").first
    expect(effect).to_contain_text("right letter")
    group = page.evaluate("window.lens.runs[0].story.prompts[0].cards[0].group")
    assert group in asked or page.url.startswith("file:")
    page.locator("#story-cards .switch").first.click()
    expect(effect).to_be_empty()


def test_a_text_that_was_replaced_or_left_comes_back(page):
    type_in(page, WORDS)
    follows = page.locator("#story-next p bdi")  # the text that the next tokens follow
    expect(follows).to_have_text(f"“{WORDS}”")
    page.locator("#story-tokens [data-token='3']").click()
    expect(follows).to_have_text(f"“{WORDS[:4]}”")
    page.locator("#story-next li button").first.click()
    expect(page.locator("#story-tokens [data-token]")).to_have_count(5)
    page.locator("#undo").click()
    expect(page.locator("#story-tokens")).to_have_text(WORDS)
    assert page.locator("#typed").input_value() == WORDS
    page.locator("#leave").click()
    expect(page.locator("#typed")).to_have_value("")
    page.locator("#undo").click()
    expect(page.locator("#story-tokens")).to_have_text(WORDS)
    expect(page.locator("#undo")).to_be_hidden()


def greedy(reader, ids, count):
    for _ in range(count):
        ids = [*ids, reader.read(ids=ids).next.ids[0]]
    return ids


def test_continue_until_the_text_is_full_and_take_another_token(page, reader):
    type_in(page, WORDS)
    page.locator("#sampling summary").click()
    page.locator("#temperature").fill("0")
    page.locator("#continue").click()
    expect(page.locator("#story-tokens [data-token]")).to_have_count(32)  # the context length
    expect(page.locator("#continue")).to_contain_text("continue")
    ids = greedy(reader(40), [*WORDS.encode()], 32 - len(WORDS))
    assert page.locator("#typed").input_value() == bytes(ids).decode("utf-8", "replace")
    page.locator("#story-tokens [data-token='9']").click()
    second = reader(40).read(ids=ids[:10]).next.ids[1]
    page.locator("#story-next li button").nth(1).click()  # the text continues from there
    expect(page.locator("#continue")).to_contain_text("continue")
    expect(page.locator("#story-tokens [data-token]")).to_have_count(32)
    ids = greedy(reader(40), [*ids[:10], second], 21)
    expect(page.locator("#typed")).to_have_value(bytes(ids).decode("utf-8", "replace"))


SLOW = """const { fetch } = window;
window.fetch = async (...wanted) => {
  if (wanted[1]?.method === "POST") await new Promise((done) => setTimeout(done, 400));
  return fetch(...wanted);
};"""


@pytest.fixture
def slow(window, address):
    """The page of a server that answers late. Fails when a script failed."""
    wrong = []
    lens = window(reduced_motion="reduce").new_page()
    lens.on("pageerror", lambda error: wrong.append(str(error)))
    lens.add_init_script(SLOW)
    lens.goto(address)
    pages.ready(lens)
    yield lens
    lens.close()
    assert wrong == []


def test_what_one_does_while_a_text_is_read_is_not_lost(slow, reader):
    type_in(slow, WORDS)
    slow.locator("#show-all").click()
    for layer, head in ((0, 1), (1, 0)):  # the second before the first is off
        pages.tile(slow, layer, head).click()
        slow.locator("#switch-head").click()
    slow.locator("#show-story").click()
    expect(slow.locator("#all-on")).to_be_visible()
    expects(slow, reader(40).read(WORDS, off=[1, 2]))
    slow.locator("#typed").fill("a dog")
    slow.locator("#all-on").click()  # before the new text is there
    expect(slow.locator("#story-tokens")).to_have_text("a dog")
    expects(slow, reader(40).read("a dog"))
    slow.locator("#typed").fill("a fox")
    go_to(slow, 1)
    expect(slow.locator("#story-tokens")).to_have_text("a fox")
    expect(slow.locator("#story-now b")).to_have_text("step 20")
    expects(slow, reader(20).read("a fox"))


# Stops unless the text is already full: a fast model may be that fast.
START_AND_STOP = """async () => {
  const button = document.querySelector("#continue");
  button.click();
  await new Promise((done) => setTimeout(done, 30));
  if (button.textContent.includes("stop")) button.click();
}"""
TYPE = "(node, text) => { node.value = text; node.dispatchEvent(new Event('input')); }"


def test_a_continuation_is_stopped(page, reader):
    page.locator("#temperature").evaluate("node => { node.value = 0; }")
    type_in(page, WORDS)
    tokens = page.locator("#story-tokens [data-token]")
    for _ in range(3):
        page.evaluate(START_AND_STOP)
        expect(page.locator("#continue")).to_contain_text("continue")
        length = "document.querySelector('#typed').value.length"
        page.wait_for_timeout(300)  # it could go on in this time
        assert tokens.count() == page.evaluate(length)
        type_in(page, "a dog")
        page.locator("#continue").evaluate("node => node.click()")
        page.locator("#typed").evaluate(TYPE, WORDS)  # at once: the model writes there, too
        page.wait_for_timeout(300)
        expect(tokens).to_have_count(len(WORDS))
        assert page.locator("#typed").input_value() == WORDS
    page.locator("#continue").click()
    page.locator("#leave").click()
    expect(page.locator("#take-prompt")).to_be_visible()


def predict_bytes_of(character):
    """Returns what changes a model: after position t, byte t + 1 of the repeated character."""

    def change(tensors):
        for name, tensor in tensors.items():
            tensor.mul_(1e-3)
            if name.startswith(("final_norm", "token_emb", "pos_emb")):
                tensor.fill_(name == "final_norm.weight")
        known = character.encode()
        for n, byte in enumerate(known):
            tensors["token_emb.weight"][byte, n] = 1
            tensors["pos_emb.weight"][(n - 1) % len(known) :: len(known), n] = 3

    return change


def test_a_continuation_does_not_end_inside_a_character(tmp_path, window):
    """After 100 tokens, the most of a continuation, a character of three tokens is begun."""
    long = ("data.max_length=128", "model.context_length=128", "trainer.max_steps=1")
    run = train_in(tmp_path, "name=characters", *RUN, *long)
    checkpoint = run / "checkpoints" / "step_00000001"
    change_tensors(checkpoint / "model.safetensors", predict_bytes_of("語"))
    write_checksums(checkpoint)
    shutil.copy(write_play_page(run, "finished"), tmp_path)
    lens = window(reduced_motion="reduce").new_page()
    with contextlib.closing(lens):
        lens.goto((tmp_path / "play.html").as_uri())
        pages.ready(lens)
        lens.locator("#temperature").evaluate("node => { node.value = 0; }")
        type_in(lens, "語")
        lens.locator("#continue").click()
        expect(lens.locator("#continue")).to_contain_text("stop")
        expect(lens.locator("#continue")).to_contain_text("continue")
        expect(lens.locator("#typed")).to_have_value("語" * 35)


def test_a_score_is_the_sum_of_its_parts(page):
    type_in(page, WORDS)
    page.locator("#show-all").click()
    pages.tile(page, 1, 1).click()
    page.mouse.click(*pages.cell(page, 9, 3, size=len(WORDS)))
    rows = page.locator("#why-parts tbody tr")
    expect(rows).to_have_count(7)  # five pairs, the others, the sum
    number = "nodes => nodes.map((node) => Number(node.textContent.replace('−', '-')))"
    *parts, total = page.locator("#why-parts tbody td.number").evaluate_all(number)
    assert abs(sum(parts) - total) < 0.05
    page.locator("#why-parts button").first.click()  # a head that wrote a part
    expect(page.locator("#detail-title")).to_contain_text("L0 H")


def test_the_recorded_prompts_come_back(page):
    before = page.locator("#story-tokens").inner_text()
    page.locator("#take-prompt").click()
    expect(page.locator("#take-prompt")).to_be_hidden()
    expect(page.locator("#typed")).not_to_have_value("")
    page.locator("#typed").fill("")
    expect(page.locator("#take-prompt")).to_be_visible()
    expect(page.locator("#story-tokens")).to_have_text(before)


def test_a_removed_run_is_named_and_the_page_stays(tmp_path, typed_run, window):
    copy = shutil.copytree(typed_run, tmp_path / "runs" / "typed", symlinks=True)
    lens = window(reduced_motion="reduce").new_page()
    with contextlib.closing(lens), serving(copy.parent, next(ports)) as server:
        lens.goto(f"{server.address}run/typed/")
        pages.ready(lens)
        type_in(lens, WORDS)
        shutil.rmtree(copy)
        lens.locator("#typed").fill("another text")
        expect(lens.locator("#message")).to_be_visible()
        expect(lens.locator("#story-tokens [data-token]")).to_have_count(len(WORDS))


def test_a_hostile_text_is_text(page):
    text = "<img src=x onerror=alert(1)>"
    type_in(page, text)
    expect(page.locator("#story-tokens")).to_have_text(text)


def test_the_page_of_a_model_without_a_run(tmp_path, typed_run, reader, window):
    folder = shutil.copytree(
        typed_run / "checkpoints" / "step_00000030", tmp_path / "step_00000030"
    )
    lens = window(reduced_motion="reduce").new_page()
    with (
        contextlib.closing(lens),
        live_command(tmp_path, next(ports), f"model={folder}") as address,
    ):
        lens.goto(address)
        pages.ready(lens)
        type_in(lens, WORDS)
        expects(lens, reader(30).read(WORDS))
