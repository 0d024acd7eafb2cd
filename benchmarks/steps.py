"""Training steps without validation and checkpoints, to measure speed and memory.

    python -m benchmarks.steps model=gpt2-xl trainer.max_steps=8 trainer.log_every=2

The settings, metrics.jsonl and summary.json are those of train.py, which always saves the last
checkpoint: 19 GB for gpt2-xl.
"""

from clearhead.config import compose
from clearhead.config.command_line import command_line
from clearhead.output.summary import write_summary
from clearhead.run.build import build_run
from train import evaluate_and_log, log_row, train_step


def main() -> None:
    with command_line() as overrides:
        if not {"-h", "--help"}.isdisjoint(overrides):
            print(__doc__.strip())
            return
        run = build_run(compose(overrides))
        state = run.state
        with run, run.translate_errors():
            run.metrics.start()
            while state.step < run.stop.last_step:
                run.metrics.add(*train_step(run))
                evaluate_and_log(run, log_row(run) if run.is_due("log") else {})
            run.log.tracker.sync()
            write_summary(run.directory, run.config, state, run.stop.limit.started, {})


if __name__ == "__main__":
    main()
