"""Counts phrases that this project avoids. Each has a term to use instead.

    python -m tests.phrases                prints where they are; exits with 1 if there are any
    python -m tests.phrases --at efbf10f   counts of another commit, and of the working tree

Part of `make lint`. Searched: every text file that git tracks, except corpus/, results of
benchmarks and this file.
"""

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SKIPPED = re.compile(r"^(corpus/|benchmarks/results/|tests/phrases\.py$)|\.(png|webp)$")

# Prose: (pattern, what to write instead). Matched without regard to case, and in names too:
# an underscore counts as a blank.
PHRASES = [
    (r"\bno numbers?\b(?! (of|in|is)\b)|numbers? (that )?go(es)? wrong", "NaN or inf; non-finite"),
    (r"\b(steps?|is|are|was|were|be|been|it|them) left out\b|\bleaves? out\b", "skipped, omitted"),
    (r"\b(go|goes|going|gone|went) on\b(?! to\b)", "resume, continue"),
    (r"(the )?same command again|command is given again", "rerun the same command"),
    (r"\bwhole or not at all\b|\bis (there )?whole\b|\bwhole after each\b", "atomic; complete"),
    (r"\bhanded to the disk\b|\bdisk has (it|what)\b", "flushed to disk (fsync)"),
    (r"\brank (is|was) gone\b|\brank (that )?(did|does) not answer\b", "died or timed out"),
    (r"\bsays? of itself\b|\bsaid of itself\b", "run summary"),
    (r"\bthe door\b", "command-line entry point"),
    (r"\bcan be told to\b|\bas (it is|they are) told\b|\bas told\b", "settings, config"),
    (r"\bcourses?\b(?! of action)(?<!of course)", "schedule"),
    (
        r"\bportions?\b(?! of the Software)|\bits shares?\b|\brank's share\b",
        "micro-batches, shards, part",
    ),
    (r"\blooks? (up|back)\b(?= evenly|\b)|\ba look\b|\blooking took\b", "evaluates; a snapshot"),
    (r"\btokens? (that|which) looks?\b|\blooked at\b(?! the river)", "query token, key token"),
    (r"\bhow widely\b|\brests? on\b", "entropy, attention sink"),
    (r"\bin turns?\b|\bby turns\b|\bturn about\b", "alternating"),
    (r"\bone after the other\b", "sequentially"),
    (r"\banew\b", "again"),
    (r"\bso many\b", "N, a given number of"),
    (r"\bstands?\b(?! (still|out|up)\b)|\bstood\b", "is"),
    (r"\bmend(s|ed|ing)?\b", "fix"),
    (r"\bseen of the heads?\b", "attention statistics"),
    (r"\bmade into tokens\b|\btexts? become tokens\b", "tokenize"),
    (r"\bcut off\b|\bcropp(ed|ing)\b|\bcut short\b", "truncated"),
    (r"\bfilled up\b", "padded"),
    (r"\bnever come back\b|\bpatience\b", "timeout"),
    (r"\bmain (rank|process|one)\b", "rank 0"),
    (r"\bbeside\b(?! the point)", "next to, with"),
    (r"\bof (its|their|our|his|one's) own\b", "separate"),
    (r"\ball the same\b", "anyway"),
    (r"\bstate of things\b", "status"),
    (r"\bno (longer )?what it was\b|\bis no more\b", "changed; removed"),
    (r"\bthe way to go on\b|\bgo(es)? on with\b", "resume with"),
    (r"\bof any length\b.{0,20}\bas they come\b|\bas they come\b", "in order"),
]
# Names. Matched with case, in all files.
NAMES = [
    (r"\bsound\b", "all finite"),
    (r"\b(whole_ones|is_one)\b", "list_checkpoints, is_checkpoint"),
    (r"\baccumulating\b", "no_sync"),
    (r"\bjudge\w*\b", "found_inf"),
    (r"\bnever_in_the_way\b", "best_effort"),
    (r"\bexplaining\b", "translate_errors"),
    (r"\bsettled?\b", "resolve_auto, wait_for_pending_save"),
    (r"\bevenly\b(?=\W+(attend|over all|look)|\()", "uniform; evenly_spaced"),
    (r"\bReader\b", "pretrained model"),
    (r"\b(feed|Feed)\b", "data loader, sampler"),
    (r"\b(guard|meter|Guard|Meter)s?\b(?!=False)", "non-finite check, metrics"),
    (r"\bfitting\b", "micro-batch search"),
    (r"\b(durable|announce)\b", "atomic files, summary"),
    (r"\b(contenders|agreement|ceilings)\b", "implementations, equivalence check, roofline"),
    (r"(?<!\")\bnum_tokens=", "max_new_tokens"),
    (r"\b(mine|taken|share)\(", "lock; broadcast"),
]
PATTERNS = [(re.compile(p, re.IGNORECASE), term) for p, term in PHRASES]
PATTERNS += [(re.compile(p), term) for p, term in NAMES]


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True, errors="replace"
    ).stdout


def texts(commit: str | None) -> dict[str, str]:
    """The content of the files of a commit, or of the working tree."""
    listing = git("ls-tree", "-r", "--name-only", commit) if commit else git("ls-files")
    names = [name for name in listing.splitlines() if not SKIPPED.search(name)]
    if commit:
        return {name: git("show", f"{commit}:{name}") for name in names}
    present = [name for name in names if (REPOSITORY / name).is_file()]
    return {name: (REPOSITORY / name).read_text("utf-8", errors="replace") for name in present}


def prose_of(name: str, text: str) -> str:
    """Of a notebook only what people write, without the outputs of cells."""
    if not name.endswith(".ipynb"):
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def found(files: dict[str, str]) -> list[tuple[str, int, str, str]]:
    """(file, line, phrase, term to use instead) of each place."""
    places = []
    for name, text in files.items():
        for number, line in enumerate(prose_of(name, text).splitlines(), 1):
            for pattern, term in PATTERNS:
                searched = line.replace("_", " ") if pattern.flags & re.IGNORECASE else line
                places += [(name, number, m[0], term) for m in pattern.finditer(searched)]
    return places


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", metavar="COMMIT", help="also count at this commit")
    commit = parser.parse_args().at
    here = found(texts(None))
    if commit:
        before, now = (Counter(p[3] for p in places) for places in (found(texts(commit)), here))
        print(f"{'use instead':<48}{commit[:12]:>12}{'now':>8}")
        for term in sorted(before | now, key=lambda t: -before[t]):
            print(f"{term:<48}{before[term]:>12}{now[term]:>8}")
        print(f"{'all':<48}{before.total():>12}{now.total():>8}")
        return 0
    for name, number, phrase, term in here:
        print(f"{name}:{number}: '{phrase}'; write: {term}")
    return int(bool(here))


if __name__ == "__main__":
    raise SystemExit(main())
