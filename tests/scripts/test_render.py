"""scripts/render.py: pages and images of a run are made again from its data."""

from helpers.refusals import printed_keys
from helpers.runs import train_in

from scripts.render import main


def test_pages_of_a_run_are_made_again(in_process, tmp_path, capsys):
    train_in(tmp_path, "name=one", "lens=often", "lens.prompts=[the fox]", "lens.repeat_length=3")
    run = tmp_path / "runs" / "one"
    attention, kinds = run / "attention", (".html", ".webp", ".png")
    made = [path for path in attention.iterdir() if path.suffix in kinds]
    before = {path: path.read_bytes() for path in made}
    for path in (*made, run / "report.html"):
        path.unlink()
    capsys.readouterr()  # the lines of the training have these paths too
    code, out, err = in_process(main, tmp_path, "run=runs/one")
    assert (code, err) == (0, "")
    made = [path for path in attention.iterdir() if path.suffix in kinds]
    is_same = {path: path.read_bytes() for path in made} == before
    assert is_same
    assert (run / "report.html").is_file()
    for path in ("attention/timelapse.html", "report.html"):
        assert f"runs/one/{path}" in out.split()

    (run / "attention" / "step_00000001.npz").write_bytes(b"of another version")
    for wrong in ("runs/one", "runs"):
        code, _, err = in_process(main, tmp_path, f"run={wrong}")
        assert (code, printed_keys(err)) == (3, ["run"])
