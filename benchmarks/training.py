"""Training speed of clearhead and other projects: the same model, data and mathematics.

    python -m benchmarks.training model=gpt2-small batch_size=4 length=256
    python -m benchmarks.training nanogpt=../nanoGPT llms_from_scratch=../LLMs

Whole optimizer steps (forward, backward, clipping, AdamW) of all implementations in one process, on
the same random tokens, from the same weights, without dropout. First each implementation has to
compute the same loss, gradient norm and update as ours; otherwise the command ends with exit code
4. Then their steps are interleaved: A B C, then C B A, and so on, so that changes of the machine's
speed affect all of them.

Two tables. As shipped: each as its own project runs it on this device by default. Equalised: all in
the same precision and compiled. Speedups compare steps of the same round. The roofline is measured
in the same process. The implementations: benchmarks/implementations.py.
"""

import sys

from benchmarks.settings import TrainingBenchmark, composed
from training.config.command_line import errors_in_one_line, show_help


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        show_help(TrainingBenchmark)
        print("\nAlso model.KEY=VALUE and optimizer.KEY=VALUE as in training: train.py --help")
        return
    with errors_in_one_line(debug="debug=true" in arguments):
        settings, training = composed(arguments)
        from benchmarks.comparison import compare  # imports torch

        compare(settings, training, arguments)


if __name__ == "__main__":
    main()
