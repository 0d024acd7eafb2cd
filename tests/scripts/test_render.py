"""scripts/render.py: pages and images of a run are made again from its data."""

from helpers.refusals import printed_keys
from helpers.runs import train_in

from scripts.render import main


def test_pages_of_a_run_are_made_again(in_process, tmp_path):
    train_in(tmp_path, "name=one", "lens=often", "lens.prompts=[the fox]", "lens.repeat_length=3")
    run = tmp_path / "runs" / "one"
    made = [path for path in (run / "attention").iterdir() if path.suffix in (".html", ".webp")]
    before = {path: path.read_bytes() for path in made}
    assert {path.name for path in made} == {"timelapse.html", "timelapse.webp"}
    for path in (*made, run / "report.html"):
        path.unlink()
    code, _, err = in_process(main, tmp_path, "run=runs/one")
    assert (code, err) == (0, "")
    assert {path: path.read_bytes() for path in made} == before
    assert (run / "report.html").is_file()
    pages = {path.name for path in (run / "attention").glob("step_*.html")}
    assert pages == {f"step_{step:08d}.html" for step in (0, 4)}  # not made by a run without W&B

    (run / "attention" / "step_00000001.npz").write_bytes(b"of another version")
    for wrong in ("runs/one", "runs"):
        code, _, err = in_process(main, tmp_path, f"run={wrong}")
        assert (code, printed_keys(err)) == (3, ["run"])
