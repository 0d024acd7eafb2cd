"""Several ranks compute the same as one process, write one run, and fail together.

All run on CPU over gloo. CAMPAIGN=1 adds four ranks, two torchrun nodes and rarer combinations.
"""

import functools
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, TEXT
from helpers.ranks import (
    COMPARABLE,
    SHORT,
    STRATEGIES,
    TORCHRUN,
    check_same_bytes,
    check_same_losses,
    check_same_tensors,
    free_port,
    last,
    runs_in,
    started,
    values,
    wait_for_exit,
    write_texts,
)
from helpers.refusals import printed_keys
from helpers.runs import change_state, contents, rows, train_in
from helpers.tally import CAMPAIGN, in_campaign
from helpers.texts import prepare
from helpers.trainings import STEP, ForkServer, interrupt, printed_command
from safetensors.torch import load_file

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from headlens import read_snapshot

HALF = SHORT // 2
BUILD = """
import os
from clearhead.run.build import build_run
from helpers import TINY
from helpers.settings import settings
"""
WATCHED = ("trainer.sample_tokens=8", "lens=default", "lens.every=4", "lens.repeat_length=8")
WATCHED += ("lens.prompts=[the quick fox]",)
# Windows within short documents have different numbers of targets.
DOCUMENTS = ("data.path=short.jsonl", "data.within_documents=true")
DOCUMENTS += ("data.tokenizer=bpe", "model.vocab_size=null")  # rank 0 trains the tokenizer
# The code generator takes a minute.
COMPILER = os.environ.get("CAMPAIGN_COMPILER", "aot_eager")
RECOMPUTED, COMPILED = "trainer.activation_checkpointing=true", "trainer.compile=true"
# Hydra sets it in each rank; ranks with different settings are refused.
OF_THE_JOB = ("+hydra.job.env_set.GROUP=here", "wandb.group=${oc.env:GROUP,unset}")
# Equivalent computations: number of ranks, strategy, settings.
VARIANTS = [
    (2, "ddp", RECOMPUTED, "trainer.micro_batch_size=3", *OF_THE_JOB),
    (2, "fsdp", "trainer.micro_batch_size=null"),
]
if CAMPAIGN:
    VARIANTS += [(2, way, more) for way in STRATEGIES for more in (RECOMPUTED, COMPILED)]
    VARIANTS += [(4, way, "trainer.micro_batch_size=1") for way in STRATEGIES]


class Place:
    """A folder in which one process and several ranks train on the same text files."""

    def __init__(self, server: ForkServer, folder):
        self.server, self.folder = server, write_texts(folder)
        self.alone = functools.cache(self._alone)
        self.watched = functools.cache(self._watched)
        self.whole = functools.cache(lambda way, *more: self.ranks(f"whole_{way}", *more)[0])

    def _alone(self, *arguments):
        """Returns the run of a single process; trains it once."""
        name = f"alone{len(list(self.folder.glob('runs/alone*')))}"
        return train_in(self.folder, *COMPARABLE, *arguments, f"name={name}")

    def _watched(self, way):
        """A run with all features and a slow rank 0: its directory and its ranks."""
        faults = [{"slow": {"seconds": 0.1}}, None]
        return self.ranks(way, *WATCHED, f"parallel={way}", faults=faults)

    def ranks(self, name, *arguments, **more):
        """Trains with two ranks. Returns the ranks and their run directory."""
        trainings = self.server.run_ranks(
            self.folder, *COMPARABLE, f"name={name}", *arguments, **more
        )
        return self.folder / "runs" / name, trainings


def half_of(run: Path, name: str) -> str:
    """Copies a run to runs/NAME as it was after step HALF. Returns the name."""
    later = [p.name for p in listing.list_checkpoints(run) if listing.step_of(p) > HALF]
    ignore = shutil.ignore_patterns(*later, "last", "best", "summary.json")
    shutil.copytree(run, run.parent / name, symlinks=True, ignore=ignore)
    return name


@pytest.fixture(scope="module")
def place(server, tmp_path_factory):
    return Place(server, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", params=STRATEGIES)
def watched(place, request):
    """(A run of two ranks; the same run in one process; output of each rank.)"""
    run, trainings = place.watched(request.param)
    return run, place.alone(*WATCHED), trainings


def test_two_ranks_train_as_one(watched):
    """Losses, clipped gradients, validation on 7 windows, parameters, samples, files, output."""
    many, one, (main, other) = watched
    assert (main.err, other.err, other.out) == ("", "", "")
    assert max(values(one, "train/grad_norm").values()) > 0.5  # they are clipped
    check_same_losses(many, one)
    for step in (HALF, SHORT):
        check_same_tensors(last(many, step), last(one, step))
    assert (many / "samples.jsonl").read_bytes() == (one / "samples.jsonl").read_bytes()
    ends = [json.loads((run / "validation.json").read_text()) for run in (many, one)]
    torch.testing.assert_close(*ends, rtol=1e-4, atol=0)
    not_with_fsdp = {"attention/ablation.json"}
    assert contents(many).keys() | not_with_fsdp == contents(one).keys()
    assert [row.keys() for row in rows(many)] == [row.keys() for row in rows(one)]


def test_the_lens_measures_the_same(watched):
    files = [run / "attention" / "statistics.jsonl" for run in watched[:2]]
    mine, theirs = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert [row["step"] for row in theirs] == [0, HALF, SHORT]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    readings = []  # in the order of runs, steps and prompts
    for run in watched[:2]:
        details = [read_snapshot(path).details for path in sorted(run.glob("attention/*.npz"))]
        readings.append([p["losses"] for of in details for p in of["predictions"]["of_prompts"]])
    assert readings[0]
    torch.testing.assert_close(*readings, rtol=0, atol=1e-3)


def test_a_checkpoint_has_the_same_state(watched):
    many, one = (checkpoint.load_state(last(run, HALF)) for run in watched[:2])
    assert many.settings["parallel"]["strategy"] == watched[0].name
    for settings in (one.settings, many.settings):
        del settings["name"], settings["parallel"]
    for key in ("val_loss", "best_loss", "losses"):
        mine, theirs = (asdict(state)[key] for state in (many, one))
        assert mine == pytest.approx(theirs, rel=1e-5)
        setattr(many, key, getattr(one, key))
    assert many == one


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_do_not_depend_on_how_they_are_computed(place, variant):
    ranks, way, *more = variant
    name = f"variant_{VARIANTS.index(variant)}"
    special = {"faults": [{"compiler": {"backend": COMPILER}}] * ranks, "codes": [0] * ranks}
    run, _ = place.ranks(name, f"parallel={way}", *more, **special)
    check_same_losses(run, place.alone(*WATCHED))
    check_same_tensors(last(run), last(place.alone(*WATCHED)))


def test_a_block_of_fsdp_is_one_graph(place):
    """All blocks share it. Hooks of FSDP inside a block would cut it."""
    code = """
import functools, torch
from train import train_step
graphs = []
backend = lambda graph, inputs: graphs.append(graph) or graph
torch.compile = functools.partial(torch.compile, backend=backend)
own = ("name=graphs", "data.path=text.txt", "parallel=fsdp", "trainer.compile=true")
with build_run(settings(*TINY, *own)) as run:
    train_step(run)
    assert len(graphs) == 1, len(graphs)
"""
    place.server.run_ranks(place.folder, code=BUILD + code)


def test_ranks_draw_the_initial_weights_of_one_process(place):
    """On a GPU, where no rank builds the complete model first."""
    code = """
import torch
from clearhead.parallel.strategy import Strategy
own = ("name=new", "data.path=text.txt", "parallel=fsdp")
with build_run(settings(*TINY, *own)) as run:
    alone, models = Strategy(run.strategy.device, torch.float32), []
    for strategy in (run.strategy, alone):
        torch.manual_seed(3)
        models.append(strategy.new_model(run.model.config))
    for mine, whole in zip(*(model.parameters() for model in models), strict=True):
        assert mine.to_local().numel() < whole.numel()
        assert torch.equal(mine.full_tensor(), whole)
    assert 0.01 < models[1].token_emb.weight.std() < 0.03
"""
    place.server.run_ranks(place.folder, code=BUILD + code)


@pytest.mark.parametrize("way", STRATEGIES if CAMPAIGN else ["fsdp"])
def test_bf16_stays_near(place, way):
    """Only one machine has memory for the copy of a checkpoint."""
    bf16 = "trainer.precision=bf16"
    faults = [{"no_memory": {}}, None]
    run, _ = place.ranks(f"bf16_{way}", bf16, f"parallel={way}", faults=faults)
    one = place.alone(bf16)
    assert values(run, "train/loss") == pytest.approx(values(one, "train/loss"), abs=1e-2)
    check_same_tensors(last(run), last(one), most=0.1)


def test_frozen_parameters_stay_and_the_others_train_as_in_one_process(place):
    modules = ["token_emb", "blocks.0", "blocks.1.attn.W_key"]
    one, *others = [
        place.ranks(
            f"frozen_{way}",
            f"parallel={way}",
            faults=[{"frozen": {"modules": modules}}] * n,
            codes=[0] * n,
        )[0]
        for way, n in (("single", 1), *((way, 2) for way in STRATEGIES))
    ]
    for many in others:
        check_same_losses(many, one)
        check_same_tensors(last(many), last(one))


def test_muon_trains_documents_as_in_one_process(place):
    """Each target counts the same on all ranks. Each rank orthogonalizes half of the matrices; with
    ddp, weights and moments stay equal on all ranks. Products in bf16, where that is fast, magnify
    how sums were rounded. Rank 1 has no memory for the copy of a checkpoint."""
    settings = (*DOCUMENTS, "optimizer=muon", "optimizer.matrix_lr=2e-3")
    one = place.alone(*settings)
    steps = [place.folder / f"muon_of_{rank}" for rank in range(2)]
    for name, after, way in [("muon_ddp", 0, "ddp"), ("muon_ddp_to_fsdp", HALF, "fsdp")]:
        if after:
            half_of(place.folder / "runs" / "muon_ddp", name)
        parallel = f"parallel={way}"
        faults = [{"watch_parameters": {"file": str(file)}} for file in steps * (way == "ddp")]
        faults = faults or [None, {"no_memory": {}}]
        many, _ = place.ranks(name, *settings, parallel, faults=faults)
        check_same_losses(many, one, after=after)
        check_same_tensors(last(many), last(one), most=5e-4)
    assert steps[0].read_text() == steps[1].read_text()
    weight = "blocks.0.mlp.fc.weight"
    moved, start = (load_file(last(one, s) / "model.safetensors")[weight] for s in (None, HALF))
    assert float((moved - start).abs().max()) > 3e-3


@pytest.mark.parametrize(
    ("start", "goal", "ranks"),
    [("fsdp", None, 1), (None, "fsdp", 2)]
    + [("ddp", None, 1), ("fsdp", "ddp", 2), (None, "fsdp", 4)] * CAMPAIGN,
)
def test_a_run_resumes_with_other_ranks(place, start, goal, ranks):
    """Parameters and moments are resharded or gathered."""
    one = place.alone(*WATCHED)
    source = place.watched(start)[0] if start else one
    name = half_of(source, f"{start}_to_{goal}_{ranks}")
    if goal is None:
        run = train_in(place.folder, *COMPARABLE, *WATCHED, f"name={name}")
    else:
        special = {"faults": [None] * ranks, "codes": [0] * ranks}
        run, _ = place.ranks(name, *WATCHED, f"parallel={goal}", **special)
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [each["step"] for each in starts] == [0, HALF]
    check_same_losses(run, one, after=HALF)
    check_same_tensors(last(run), last(one))


def test_ranks_that_do_not_see_the_run_continue_it(place):
    """Only rank 0 has the run: the others receive its settings, and its best loss, without which
    one rank would save what the others do not."""
    best = 0.25  # lower than all losses of these runs
    alone = place.alone()
    for rank in range(2):
        write_texts(place.folder / f"machine_{rank}")
    main, other = place.folder / "machine_0" / "runs", place.folder / "machine_1" / "runs"
    shutil.copytree(alone, main / alone.name, symlinks=True)
    change_state(last(main / alone.name).resolve(), best_loss=best)
    before = checkpoint.load_state(last(alone))
    further = ("parallel=fsdp", "trainer.max_steps=12", "trainer.micro_batch_size=4")
    resume = (f"name={alone.name}", "trainer.eval_every=1", *further)
    place.server.run_ranks(place.folder / "machine_{rank}", *COMPARABLE, *resume)
    state = checkpoint.load_state(last(main / alone.name))
    assert (state.step, state.best_loss) == (12, best)
    for group in ("model", "data", "optimizer"):
        assert state.settings[group] == before.settings[group]
    assert state.settings["trainer"]["micro_batch_size"] == 4
    assert not other.exists()


# Signals of one rank, with which all ranks stop after step HALF: during its validation, during the
# first micro-batch of the next step, and during an update, with a slow write of its checkpoint.
STOPPED = {
    "validation": [None, interrupt(("SIGTERM", "clearhead.run.run.Run.evaluate", 2))],
    "micro-batch": [
        None,
        interrupt(("SIGTERM", "clearhead.parallel.strategy.Strategy.backward", 2 * HALF + 1)),
    ],
    "update": [
        interrupt(("SIGTERM", "clearhead.parallel.ddp.DDP.update", HALF))
        | {"slow": {"seconds": 0.1}},
        None,
    ],
}


@pytest.mark.parametrize("way", STRATEGIES if CAMPAIGN else ["fsdp"])
@pytest.mark.parametrize("part", STOPPED if CAMPAIGN else ["validation", "micro-batch"])
def test_a_signal_to_one_rank_stops_all_and_resume_is_bit_exact(place, way, part):
    """With dropout, whose random numbers follow from seed, step and rank; by the command that is
    printed."""
    settings = ("model.dropout=0.2", f"parallel={way}")
    whole = place.whole(way, *settings)
    special = {"faults": STOPPED[part], "codes": [143, 143]}
    cut, (main, other) = place.ranks(f"{part}_{way}", *settings, **special)
    assert other.err == ""
    assert listing.newest_step(cut) == HALF
    assert rows(cut)[-1]["step"] == (HALF - 1 if part == "validation" else HALF)
    check_same_bytes(cut, whole, HALF)
    program, command = printed_command(main.err)
    assert program.endswith("torchrun --nproc_per_node=2")
    place.server.run_ranks(place.folder, *command)
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        assert values(cut, key) == values(whole, key)
    check_same_bytes(cut, whole)


def test_ranks_that_are_out_of_time_end_together(place):
    """Rank 0 has no time after step 4, the clock of rank 1 does not count. The learning rate of
    that step is the last one."""
    settings = ("trainer.max_minutes=100", "parallel=fsdp")
    run, _ = place.ranks("out_of_time", *settings, faults=[{"out_of_time": {"step": HALF}}, None])
    assert [row["step"] for row in rows(run)] == list(range(HALF + 1))
    *_, before, final = values(run, "train/learning_rate").values()
    assert final == pytest.approx(0.1 * before)


def test_an_attention_snapshot_that_fails_on_rank_0_does_not_end_the_ranks(place):
    broken = interrupt(("broken disk", "headlens.lens.History", 1))
    settings = (*WATCHED, "parallel=ddp")
    run, (main, _) = place.ranks("broken_lens", *settings, faults=[broken, None])
    assert "broken disk" in main.err
    check_same_tensors(last(run), last(place.alone(*WATCHED)))


def test_all_ranks_stop_early(place):
    """At this learning rate the weights stay, so the validation of step 4 is not lower than that of
    step 2."""
    settings = ("optimizer.lr=1e-20", "trainer.eval_every=2", "trainer.patience=1", "parallel=ddp")
    for _ in range(2):  # the second start has no step left
        run, _ = place.ranks("early", *settings)
        assert [row["step"] for row in rows(run)] == list(range(HALF + 2))


# Name: exit code, key, whether rank 1 alone has the problem, arguments.
REFUSALS = {
    "mistyped": (2, "paralel", False, "paralel=ddp"),
    "no_text": (3, "data.path", False, "parallel=ddp", "data.path=nowhere.txt"),
    "another_text": (3, "data.path", True, "parallel=ddp", "data.path=text{rank}.txt"),
    "broken_disk": (4, "RuntimeError", True, "parallel=fsdp"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_error_before_the_first_step_ends_all_ranks(place, name):
    """All ranks have the same exit code, rank 0 prints one line, and no run directory exists."""
    code, key, on_rank_1, *arguments = REFUSALS[name]
    folder = write_texts(place.folder / f"in_{name}")
    (folder / "text0.txt").write_text("one text, " * 500)
    (folder / "text1.txt").write_text("another,  " * 500)
    faults = [
        None,
        interrupt(("broken", "clearhead.run.start.load_datasets"))
        if name == "broken_disk"
        else None,
    ]
    codes = [code, code]
    main, other = place.server.run_ranks(
        folder, *COMPARABLE, *arguments, faults=faults, codes=codes
    )
    assert printed_keys(main.err) == [key]
    assert ("rank 1" in main.err) == on_rank_1
    assert other.err == ""
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("key", "given"),
    [("seed", ("1", "2"))]
    + [("optimizer.lr", ("0.001", "0.002")), ("parallel.strategy", ("ddp", "fsdp"))] * CAMPAIGN,
)
def test_ranks_with_different_settings_do_not_train(place, key, given):
    folder = write_texts(place.folder / f"different_{key}")
    shutil.copytree(place.alone(), folder / "runs" / "alone", symlinks=True)
    before = contents(folder / "runs")
    each = [f"{key}={value}" for value in given]
    main, other = place.server.run_ranks(folder, *COMPARABLE, each=each, codes=[2, 2])
    assert printed_keys(main.err)[0] == key
    assert all(value in main.err for value in given)
    assert other.err == ""
    assert contents(folder / "runs") == before


def test_all_ranks_have_the_prompts_of_rank_0(place, tmp_path):
    """Also if a machine has other tokens, of more than 1 GiB, whose bytes are not compared."""
    prepare(place.folder / "text.txt", tmp_path / "tokens0", tokenizer="byte")
    (file,) = shutil.copytree(tmp_path / "tokens0", tmp_path / "tokens1").rglob("*.bin")
    fox, cat = (np.array([*b"fox"], "<u2").tobytes(), np.array([*b"cat"], "<u2").tobytes())
    file.write_bytes(file.read_bytes().replace(fox, cat))
    code = """
import json
from clearhead.tokens import shards
rank, shards.MAX_VERIFIED = os.environ["RANK"], 0
with build_run(settings(*TINY, f"data.path=tokens{rank}", "name=a", "parallel=ddp")) as run:
    prompts = [*run.config.lens.prompts, run.config.trainer.sample_prompt]
    open(f"prompts{rank}", "w").write(json.dumps(prompts))
"""
    place.server.run_ranks(tmp_path, code=BUILD + code)
    prompts = [json.loads((tmp_path / f"prompts{rank}").read_text()) for rank in (0, 1)]
    assert prompts[0] == prompts[1]
    assert all(prompt in TEXT for prompt in prompts[0])
    assert "fox" in prompts[0][0]


def test_an_error_during_training_is_printed_on_each_machine(place):
    """Rank 1 is on a separate machine with a separate log."""
    folder = write_texts(place.folder / "one_breaks")
    _, other = place.server.run_ranks(
        *(folder, *COMPARABLE, "parallel=ddp"),
        faults=[None, interrupt(("broken memory", STEP, 4))],
        codes=[4, 4],
        LOCAL_WORLD_SIZE=1,
    )
    assert "RuntimeError: broken memory" in other.err
    assert len(other.err.splitlines()) == 1
    assert len(runs_in(folder)) == 1


@in_campaign
def test_two_torchrun_nodes_leave_one_run(place):
    folder = write_texts(place.folder / "in_nodes")
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=test"]
    agent = [*TORCHRUN[:2], "--nnodes=2", "--nproc_per_node=1", *meeting, "--local-addr=127.0.0.1"]
    with started(folder) as start:
        training = (REPOSITORY / "train.py", *COMPARABLE, "parallel=fsdp", "wandb=offline")
        nodes = [start(*agent, *training) for _ in range(2)]
        assert [wait_for_exit(process) for process in nodes] == [0, 0]
    (run,) = runs_in(folder)
    assert len(list(run.glob("wandb/offline-run-*"))) == 1
    check_same_losses(run, place.alone(*WATCHED))
