"""Several ranks compute what one computes, agree on one run, and say what is wrong in one line.

Two launches and one by torchrun do all the trainings here, each many (rank_worker.py); the tests
look at what they left. All run on CPU over gloo.
"""

import json
import os
import shutil

import pytest
import yaml
from helpers.ranks import (
    DOCUMENTS,
    SAME,
    SHORT,
    TORCHRUN,
    WATCHED,
    WORKER,
    Launch,
    check_same_course,
    check_same_tensors,
    ended,
    files_of,
    free_port,
    last,
    launch,
    runs_in,
    scenario,
    started,
    train_alone,
    values,
    write_scenarios,
    write_texts,
)
from helpers.runs import rows
from safetensors.torch import load_file

from training import checkpoint

UNSEEN = ("lens=off", "trainer.sample_tokens=0")
BRIEF = (*UNSEEN, "trainer.max_steps=8", "trainer.eval_every=4", "trainer.save_every=0")
DROPOUT = (*BRIEF, "model.dropout=0.2")
SLOW = (*BRIEF, "trainer.sample_tokens=2", "lens=default", "lens.every=8", *WATCHED[2:])
MUON = (*BRIEF, "optimizer=muon", "optimizer.matrix_lr=2e-3", "trainer.save_every=4")
OFFLINE = ("wandb=offline", "trainer.max_steps=4", "lens=off")
STRATEGIES = ("ddp", "fsdp")
FURTHER = ("parallel=fsdp", "trainer.max_steps=12", "trainer.micro_batch_size=4")
# What makes no difference to what is computed: the settings of a run of its own each.
VARIANTS = {
    "kept": ("parallel=fsdp", "parallel.reshard_after_forward=false"),
    "recomputed_ddp": ("parallel=ddp", "trainer.activation_checkpointing=true"),
    "recomputed_fsdp": ("parallel=fsdp", "trainer.activation_checkpointing=true"),
    "compiled_ddp": ("parallel=ddp", "trainer.compile=true"),
    "compiled_fsdp": ("parallel=fsdp", "trainer.compile=true"),
    "whole_share": ("parallel=fsdp", "trainer.micro_batch_size=null"),
    "profiled_ddp": ("parallel=ddp", "trainer.profile=true"),
    "profiled_fsdp": ("parallel=fsdp", "trainer.profile=true"),
    "windows_of_3": ("parallel=ddp", "trainer.micro_batch_size=3"),
}
# A run goes on in another way: from, to.
MOVES = [("fsdp", "alone"), ("alone", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")]
HALF = SHORT // 2
# A setting whose value on rank 1 is another than on rank 0, and the key that is named.
DIFFERENT = {
    "optimizer": ("adamw", "muon", "optimizer.name"),
    "optimizer.lr": ("0.001", "0.002", "optimizer.lr"),
    "seed": ("0", "1", "seed"),
    "data.max_length": ("32", "16", "data.max_length"),
    "trainer.grad_clip": ("0.5", "0.25", "trainer.grad_clip"),
    "model.num_layers": ("2", "3", "model.num_layers"),
    "parallel": ("ddp", "fsdp", "parallel.strategy"),
    "trainer.resume": ("runs/brief", "auto", "trainer.resume"),
}
IN_PLACE = ("trainer.resume=runs/brief", "trainer.eval_every=1")
BEST = 0.25  # a loss below all that these runs come to
# The code generator takes a minute: the campaign has it.
COMPILER = os.environ.get("CAMPAIGN_COMPILER", "aot_eager")


def damage(folder):
    """A run whose checkpoints are no checkpoints any more."""
    run = shutil.copytree(folder / "runs" / "alone", folder / "runs" / "damaged", symlinks=True)
    for whole in checkpoint.whole_ones(run):
        (whole / "model.safetensors").write_bytes(b"no tensors")


def set_best_loss(folder, loss):
    """Changes the best loss in a checkpoint, and its checksum."""
    state = folder / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"best_loss": loss}))
    sums = [f"{checkpoint.checksum(folder / name)}  {name}\n" for name in checkpoint.FILES]
    (folder / "SHA256SUMS").write_text("".join(sums))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where one process has trained, as each of the launches shall."""
    folder = write_texts(tmp_path_factory.mktemp("ranks"))
    train_alone(folder, *SAME, *WATCHED, "name=alone")
    train_alone(folder, *SAME, *BRIEF, "name=brief")
    train_alone(folder, *SAME, *BRIEF, *DOCUMENTS, "name=documents")
    train_alone(folder, *SAME, *BRIEF, "trainer.precision=bf16", "name=bf16")
    train_alone(folder, *SAME, *MUON, "name=muon")
    damage(folder)
    for other in ("other", "machine_0"):
        shutil.copytree(folder / "runs" / "brief", folder / other / "runs" / "brief", symlinks=True)
    set_best_loss(last(folder / "machine_0" / "runs" / "brief"), BEST)
    for other in ("other", "machine_0", "machine_1"):
        write_texts(folder / other)
    return folder


@pytest.fixture(scope="module")
def two(folder):
    """Two ranks, in all ways."""

    def run(name, *arguments, **special):
        return scenario(name, folder, *SAME, f"name={name}", *arguments, **special)

    def apart(name, *arguments, first=(), **special):
        """In a folder of its own."""
        return scenario(
            name, write_texts(folder / f"in_{name}"), *first, *SAME, *arguments, **special
        )

    scenarios = [run(name, *WATCHED, f"parallel={name}") for name in STRATEGIES]
    scenarios += [
        run(name, *BRIEF, *settings, compiler={"backend": COMPILER})
        for name, settings in VARIANTS.items()
    ]
    for way in STRATEGIES:
        here = f"parallel={way}"
        scenarios += [
            run(f"documents_{way}", *BRIEF, *DOCUMENTS, here),
            run(f"bf16_{way}", *BRIEF, here, "trainer.precision=bf16"),
            run(f"muon_{way}", *MUON, here),
            run(f"slow_{way}", *SLOW, here, slow={"seconds": 0.2}),
            run(f"room_0_{way}", *BRIEF, here, no_memory={"rank": 0}),
            run(f"room_1_{way}", *BRIEF, here, no_memory={"rank": 1}),
            run(f"whole_{way}", *DROPOUT, here),
            run(f"cut_{way}", *DROPOUT, here, happens={"what": "SIGTERM", "rank": 1, "after": 4}),
            run(f"cut_{way}", *DROPOUT, here) | {"name": f"rest_{way}"},
        ]
    for start, goal in MOVES:
        if goal != "alone":
            source = f"trainer.resume=runs/{start}/checkpoints/step_{HALF:08d}"
            scenarios += [run(f"{start}_to_{goal}", *UNSEEN, f"parallel={goal}", source)]
    for key, values_of in DIFFERENT.items():
        each = {str(rank): [f"{key}={value}"] for rank, value in enumerate(values_of[:2])}
        scenarios.append(scenario(f"other_{key}", folder / "other", *SAME, *BRIEF, each=each))
    # Two machines without a shared disk: the second has the text alone.
    apart_on = str(folder / "machine_{rank}")
    scenarios.append(scenario("far", apart_on, "trainer.resume=runs/brief", "name=far", *FURTHER))
    scenarios.append(scenario("in_place", apart_on, *IN_PLACE, *FURTHER))
    source = "trainer.resume=runs/muon_ddp/checkpoints/step_00000004"
    scenarios.append(run("muon_ddp_to_fsdp", *MUON, "parallel=fsdp", source))
    (folder / "in_another_text").mkdir()
    (folder / "in_another_text" / "text0.txt").write_text("one text, " * 500)
    (folder / "in_another_text" / "text1.txt").write_text("another,  " * 500)
    (folder / "in_lost_text").mkdir()
    (folder / "in_lost_text" / "text0.txt").write_text("one text, " * 500)
    fails = {"what": "broken disk", "rank": 1}
    breaks = {"what": "broken memory", "rank": 1, "after": 2, "strategy": "ddp"}
    # Whoever waited for the time limit would wait for longer than the test does.
    sweep = ("parallel=ddp,fsdp", "trainer.batch_size=8,9", *BRIEF, "parallel.timeout=1700")
    scenarios += [
        apart("sweep", *sweep, first=["-m"], happens=breaks),
        apart("searching", "parallel=ddp", "seed=interval(1,9)", first=["-m"]),
        apart("multirun", "parallel=ddp", *OFFLINE, "seed=1,2", first=["-m"]),
        apart("mistyped", "paralel=ddp"),
        apart("uneven", "parallel=ddp", "trainer.batch_size=9"),
        apart("no_text", "parallel=ddp", "data.path=nowhere.txt"),
        apart("single", "parallel=single"),
        run("damaged", "parallel=fsdp", "trainer.max_steps=30"),
        apart("another_text", "parallel=ddp", "data.path=text{rank}.txt"),
        apart("lost_text", "parallel=fsdp", "data.path=text{rank}.txt"),
        apart("one_fails", "parallel=fsdp", happens=fails),
        apart("after_all_that", "parallel=fsdp", "trainer.max_steps=2", *UNSEEN),
    ]
    made = launch(folder / "two", scenarios)
    for start, goal in MOVES:
        if goal == "alone":
            source = f"trainer.resume=runs/{start}/checkpoints/step_{HALF:08d}"
            train_alone(folder, *SAME, *UNSEEN, source, f"name={start}_to_{goal}")
    return made


@pytest.fixture(scope="module")
def four(folder):
    """Four ranks; at last the first of them is killed."""
    one_each = ("trainer.micro_batch_size=1", *UNSEEN)
    source = f"trainer.resume=runs/alone/checkpoints/step_{HALF:08d}"
    killed = {"what": "SIGKILL", "rank": 0, "after": 13}
    ways = {f"four_{way}": (f"parallel={way}",) for way in STRATEGIES}
    ways |= {"four_go_on": ("parallel=fsdp", source), "main_killed": ("parallel=ddp",)}
    scenarios = [
        scenario(name, folder, *SAME, *one_each, *settings, f"name={name}")
        for name, settings in ways.items()
    ]
    scenarios[-1] |= {"happens": killed, "last": True}
    return launch(folder / "four", scenarios, ranks=4)


# ------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("way", STRATEGIES)
def test_two_ranks_train_as_one(two, folder, way):
    """Losses, clipped gradients, validation on 7 windows, parameters, samples, the lens."""
    two.check(way)
    one, many = folder / "runs" / "alone", folder / "runs" / way
    assert max(values(one, "train/grad_norm").values()) > 0.5  # so they were clipped
    check_same_course(many, one)
    for step in (HALF, SHORT):
        check_same_tensors(last(many, step), last(one, step))
    assert (many / "samples.jsonl").read_bytes() == (one / "samples.jsonl").read_bytes()
    assert files_of(many) == files_of(one)
    assert [row.keys() for row in rows(many)] == [row.keys() for row in rows(one)]


@pytest.mark.parametrize("way", STRATEGIES)
def test_the_lens_sees_the_same(two, folder, way):
    def statistics(name):
        lines = (folder / "runs" / name / "attention" / "statistics.jsonl").read_text()
        return [json.loads(line) for line in lines.splitlines()]

    mine, theirs = statistics(way), statistics("alone")
    assert [look["step"] for look in theirs] == [0, 10, 20]
    for look, other in zip(mine, theirs, strict=True):
        assert look.keys() == other.keys()
        for key in other.keys() - {"step"}:
            for layer, other_layer in zip(look[key], other[key], strict=True):
                assert layer == pytest.approx(other_layer, abs=1e-4), (look["step"], key)


@pytest.mark.parametrize("way", STRATEGIES)
def test_each_target_counts_alike_on_all_ranks(two, folder, way):
    """Windows within short documents have different numbers of targets."""
    two.check(f"documents_{way}")
    check_same_course(folder / "runs" / f"documents_{way}", folder / "runs" / "documents")


@pytest.mark.parametrize("name", VARIANTS)
def test_how_it_is_computed_makes_no_difference(two, folder, name):
    two.check(name)
    check_same_course(folder / "runs" / name, folder / "runs" / "brief")
    check_same_tensors(last(folder / "runs" / name), last(folder / "runs" / "brief"))


@pytest.mark.parametrize("way", STRATEGIES)
def test_half_precision_stays_near(two, folder, way):
    two.check(f"bf16_{way}")
    mine = values(folder / "runs" / f"bf16_{way}", "train/loss")
    assert mine == pytest.approx(values(folder / "runs" / "bf16", "train/loss"), abs=1e-2)
    check_same_tensors(
        last(folder / "runs" / f"bf16_{way}"), last(folder / "runs" / "bf16"), most=0.1
    )


@pytest.mark.parametrize("name", ["muon_ddp", "muon_fsdp", "muon_ddp_to_fsdp"])
def test_muon_trains_as_in_one_process(two, folder, name):
    """Where the matrices have half their rows on each rank, too. What is multiplied in bf16, where
    that is fast, magnifies how sums were rounded."""
    two.check(name)
    one, many = folder / "runs" / "muon", folder / "runs" / name
    check_same_course(many, one, after=4 if "_to_" in name else 0)
    check_same_tensors(last(many), last(one), most=5e-4)
    moved = load_file(last(one) / "model.safetensors")
    start = load_file(last(one, 4) / "model.safetensors")
    name = "blocks.0.mlp.fc.weight"
    assert float((moved[name] - start[name]).abs().max()) > 3e-3


@pytest.mark.parametrize("way", STRATEGIES)
def test_a_slow_main_rank_is_waited_for(two, folder, way):
    """Evaluating, sampling, drawing and writing take their time on rank 0 alone."""
    two.check(f"slow_{way}")
    check_same_course(folder / "runs" / f"slow_{way}", folder / "runs" / "brief")


@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_for_a_copy_on_one_machine_only_is_the_main_ranks_affair(two, folder, way, rank):
    two.check(f"room_{rank}_{way}")
    check_same_course(folder / "runs" / f"room_{rank}_{way}", folder / "runs" / "brief")


@pytest.mark.parametrize("way", STRATEGIES)
def test_four_ranks_train_as_one(four, folder, way):
    four.check(f"four_{way}")
    check_same_course(folder / "runs" / f"four_{way}", folder / "runs" / "alone")
    check_same_tensors(last(folder / "runs" / f"four_{way}"), last(folder / "runs" / "alone"))


# --------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("start", "goal"), MOVES)
def test_a_run_goes_on_in_another_way(two, folder, start, goal):
    """Parameters and moments are shared out anew, or put together."""
    name = f"{start}_to_{goal}"
    if goal != "alone":
        two.check(name)
    check_same_course(folder / "runs" / name, folder / "runs" / "alone", after=HALF)
    check_same_tensors(last(folder / "runs" / name), last(folder / "runs" / "alone"))


def test_four_ranks_go_on_from_one(four, folder):
    four.check("four_go_on")
    check_same_course(folder / "runs" / "four_go_on", folder / "runs" / "alone", after=HALF)


def test_rank_0_alone_needs_the_run_that_is_resumed(two, folder):
    """Its settings, too: the command line has none of them."""
    two.check("far")
    run = folder / "machine_0" / "runs" / "far"
    state = checkpoint.load_state(last(run))
    before = checkpoint.load_state(last(folder / "runs" / "brief"))
    assert (state.step, before.step) == (12, 8)
    for group in ("model", "data", "optimizer"):
        assert state.settings[group] == before.settings[group]
    assert state.settings["trainer"]["micro_batch_size"] == 4
    assert not (folder / "machine_1" / "runs").exists()


def test_ranks_that_do_not_see_the_run_continue_it_in_place(two, folder):
    """All of them keep its best loss: else one would save what the others do not."""
    two.check("in_place")
    state = checkpoint.load_state(last(folder / "machine_0" / "runs" / "brief"))
    assert (state.step, state.best_loss) == (12, BEST)
    assert not (folder / "machine_1" / "runs").exists()


@pytest.mark.parametrize("way", STRATEGIES)
def test_a_checkpoint_tells_the_same_state(two, folder, way):
    two.check(way)
    one, many = (
        checkpoint.load_state(last(folder / "runs" / name, HALF)) for name in ("alone", way)
    )
    assert many.settings["parallel"]["strategy"] == way
    for settings in (one.settings, many.settings):
        del settings["name"], settings["parallel"]
    for key in ("val_loss", "best_loss"):
        assert getattr(many, key) == pytest.approx(getattr(one, key), rel=1e-5)
        setattr(many, key, getattr(one, key))
    assert many.spikes == pytest.approx(one.spikes, rel=1e-4)
    many.spikes = one.spikes
    assert many == one


@pytest.mark.parametrize("way", STRATEGIES)
def test_a_signal_to_one_rank_stops_all_and_they_go_on_bit_for_bit(two, folder, way):
    """With dropout, whose random numbers follow from seed, step and rank."""
    two.check(f"whole_{way}")
    assert two.codes(f"cut_{way}") == [143, 143]
    main, other = two.errors(f"cut_{way}")
    assert main.startswith("stopped by SIGTERM after step 5; saved in runs/cut_")
    assert (main.count("\n"), other) == (1, "")
    two.check(f"rest_{way}")
    assert "resumed after step 5\n" in two.said(f"rest_{way}", 0, "out")
    whole, rest = folder / "runs" / f"whole_{way}", folder / "runs" / f"cut_{way}"
    assert [row["step"] for row in rows(rest)] == list(range(9))
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        assert values(rest, key) == values(whole, key)
    for file in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = load_file(last(rest) / file), load_file(last(whole) / file)
        assert mine.keys() == theirs.keys()
        assert all(mine[name].equal(theirs[name]) for name in theirs)


# ------------------------------------------------------------------------------------ agreement


def test_one_speaks(two):
    """The other rank says nothing at all."""
    for way in STRATEGIES:
        assert f"20/{SHORT}  loss " in two.said(way, 0, "out")
        assert f"on cpu in float32, 2 ranks ({way})" in two.said(way, 0, "out")
        assert two.said(way, 1, "out") == ""
        assert two.errors(way) == ["", ""]


def test_a_multirun_leaves_one_run_for_each_value(two, folder):
    two.check("multirun")
    runs = runs_in(folder / "in_multirun")
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs] == [1, 2]
    for run in runs:
        assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
        assert len(list(run.glob("wandb/offline-run-*"))) == 1
    assert len(list((folder / "in_multirun" / "multirun").iterdir())) == 1
    assert len(list((folder / "in_multirun" / "multirun").rglob("multirun.yaml"))) == 1


def test_what_fails_on_one_rank_fails_on_all_and_a_sweep_goes_on(two, folder):
    """In the midst of training, where the other one waits for it; and before it on both."""
    assert two.codes("sweep") == [4, 4]
    main, other = two.errors("sweep")
    assert other == ""
    told = [line for line in main.splitlines() if " failed: " in line]
    assert [line.partition(" failed: ")[0] for line in told] == [f"job {n} of 4" for n in (1, 3, 4)]
    assert ": RuntimeError: broken memory; " in told[0]
    assert told[0].endswith("(on rank 1)")
    assert ": trainer.batch_size=9: cannot be shared out evenly over 2 ranks; " in told[1]
    begun, whole = runs_in(folder / "in_sweep")
    assert whole.name.endswith("_batch_size-8_parallel-fsdp")
    check_same_course(whole, folder / "runs" / "brief")
    check_same_tensors(last(whole), last(folder / "runs" / "brief"))
    (sweep,) = (folder / "in_sweep" / "multirun").iterdir()
    assert begun.name == f"{sweep.name}_batch_size-8_parallel-ddp"
    assert f"run directory    runs/{whole.name}\n" in two.said("sweep", 0, "out")
    assert f"results          multirun/{sweep.name}/results.md" in two.said("sweep", 0, "out")
    assert two.said("sweep", 1, "out") == ""
    again = [line for line in main.splitlines() if line.startswith("    again: ")]
    assert len(again) == 3
    assert all(
        line.startswith("    again: torchrun --nproc_per_node=2 train.py ") for line in again
    )


def test_ranks_do_not_draw_values_each_by_itself(two):
    assert two.codes("searching") == [2, 2]
    line, other = two.errors("searching")
    assert (line.partition(";")[0], other) == (
        "seed=interval(1,9): an interval is no list of values",
        "",
    )


@pytest.fixture(scope="module")
def nodes(folder):
    """Two machines, as far as torchrun can tell, of one rank each; at last the second one fails."""
    apart = write_texts(folder / "in_nodes")
    fails = {"what": "broken memory", "rank": 1, "after": 3}
    path = write_scenarios(
        folder / "nodes",
        [
            scenario("nodes", apart, *SAME, *BRIEF, "parallel=fsdp", "wandb=offline"),
            scenario("one_breaks", apart, *SAME, *BRIEF, "parallel=ddp")
            | {"happens": fails, "last": True},
        ],
    )
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=test"]
    agent = [*TORCHRUN[:2], "--nnodes=2", "--nproc_per_node=1", *meeting, "--local-addr=127.0.0.1"]
    with started(folder / "nodes") as start:
        agents = [start(*agent, WORKER, path) for _ in range(2)]
        for process in agents:
            ended(process)
    return Launch(folder / "nodes", 2)


def test_two_machines_leave_one_run(nodes, folder):
    nodes.check("nodes")
    run, _ = runs_in(folder / "in_nodes")
    assert len(list(run.glob("wandb/offline-run-*"))) == 1
    check_same_course(run, folder / "runs" / "brief")
    assert f"run directory    runs/{run.name}\n" in nodes.said("nodes", 0, "out")
    assert nodes.said("nodes", 1, "out") == ""


# ------------------------------------------------------------------------------------- errors


REFUSALS = {
    "mistyped": (2, "paralel=ddp: no such setting; did you mean parallel?"),
    "uneven": (2, "trainer.batch_size=9: cannot be shared out evenly over 2 ranks; "),
    "no_text": (3, "data.path=nowhere.txt: no such file"),
    "single": (2, "parallel=single: started as 2 processes"),
    "damaged": (3, "checkpoint="),
    "another_text": (3, "data.path=text1.txt: the text is another from byte 0 on than what rank 0"),
    "lost_text": (3, "data.path=text1.txt: no such file"),
    "one_fails": (4, "RuntimeError: broken disk"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_of_the_main_rank_and_leaves_no_run(two, folder, name):
    code, begins = REFUSALS[name]
    assert two.codes(name) == [code, code]
    main, other = two.errors(name)
    assert main.startswith(begins)
    assert (main.count("\n"), other) == (1, "")
    assert not (folder / f"in_{name}" / "runs").exists()


@pytest.mark.parametrize("setting", DIFFERENT)
def test_ranks_with_different_settings_do_not_train_together(two, folder, setting):
    assert two.codes(f"other_{setting}") == [2, 2]
    main, other = two.errors(f"other_{setting}")
    assert (main.count("\n"), other) == (1, "")
    assert all(word in main for word in DIFFERENT[setting])
    assert [run.name for run in runs_in(folder / "other")] == ["brief"]


@pytest.mark.parametrize("name", ["another_text", "lost_text", "one_fails"])
def test_what_fails_on_one_rank_alone_names_it(two, name):
    assert "(on rank 1, " in two.errors(name)[0]


def test_after_all_refusals_the_ranks_still_agree(two):
    two.check("after_all_that")


def test_an_error_in_training_on_one_rank_is_told_by_it(nodes):
    main, other = nodes.codes("one_breaks")
    assert other == 4
    assert main in (4, None)  # torchrun may have ended it
    assert nodes.errors("one_breaks")[1] == (
        "rank 1: RuntimeError: broken memory; run again with debug=true for the traceback\n"
    )


def test_ranks_that_lose_the_main_one_end_with_4(four, folder):
    codes = four.codes("main_killed")
    assert codes == [None, 4, 4, 4]
    told = [text for text in four.errors("main_killed")[1:] if text]
    assert told
    for text in told:
        assert text.count("\n") == 1
        assert "parallel.timeout=120: another rank is gone" in text
    _, state = checkpoint.load_model(last(folder / "runs" / "main_killed"))
    assert state.step == HALF
