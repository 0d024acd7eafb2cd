"""The first screen of the page: a few sentences and what is drawn with them, decided here.

    story(snapshot, steps, history, curves)  # the key "story" of page.run_data

Each prompt has a layout. "lines": the repeated sequence [BOS] + R + R as two rows of tokens, with
lines of attention between them. "text": a passage with one query token, and what each group of
heads attends to there. A card is a group of heads with the same name; its `without` says what the
model does without these heads, if that was recorded (recording.record_without).
"""

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .heads import ALL_NAMES, KINDS, head_table, title_of
from .history import Row, copying_step, evenly_spaced, loss_of_copy
from .prompts import BYTES_OF_TOKEN, Prompt
from .rounding import formatted_loss
from .snapshot_data import SnapshotData, from_codes, triangle_to_square
from .statistics import STATISTICS

MAX_CARDS = 3
MAX_DRAWN = 8  # heads of a card: the clearest
MAX_CHARACTERS = 260  # of a passage in large type
MAX_POINTS = 200  # of the curve
# Of the names that tell equally much, see Kind.telling, these come first.
FIRST = {"lines": ("induction",), "text": ("segment_start", "induction", "separator")}
AFTER_PUNCTUATION = ("looks at tokens after punctuation", "look at tokens after punctuation")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIVERGED = "This model has diverged: its losses are not numbers."


@dataclass(frozen=True)
class Group:
    """Heads with the same name at the last step, the clearest first."""

    name: str
    rows: list[dict]  # of heads.head_table
    heads: list[int]  # their indices
    is_there: list[int]  # at each frame, how many of them have the name

    @property
    def is_simple(self) -> bool:
        return KINDS[self.name].telling == 0


def story(
    last: SnapshotData,
    steps: Sequence[int],
    history: Sequence[Row] = (),
    curves: Mapping[str, Sequence] | None = None,
) -> dict | None:
    """Returns the story of a run, described in page/index.html; None if no prompt has three tokens.

    last: the last snapshot. steps: of the frames of the page. history: the statistics of all
    snapshots. curves: as for page.run_data.
    """
    rows = [_row_at(history or [last.row], step) for step in steps]
    told = {
        number: _Story(last, number, list(history or [last.row]), rows, curves or {})
        for number, prompt in enumerate(last.prompts)
        if len(prompt.tokens) > 2
    }
    if not told:
        return None
    found = [told[n].as_json() if n in told else None for n in range(len(last.prompts))]
    return {"opening": _opening(told, history), "prompts": found}


def _row_at(history: Sequence[Row], step: int) -> Row:
    return next((row for row in reversed(history) if row.step <= step), history[0])


def _opening(told: Mapping[int, "_Story"], history: Sequence[Row]) -> int:
    """Returns the prompt to open with: the text that shows the first card best; the repeated
    sequence if there is no other, or if the training data consists of repeated sequences."""
    repeated = [number for number, one in told.items() if one.prompt.period]
    texts = [number for number, one in told.items() if not one.prompt.period]
    any_story = next(iter(told.values()))
    stage = copying_step(any_story.last.prompts, history)
    if repeated and (not texts or (stage is not None and _is_about_copies(any_story.last))):
        return repeated[0]
    return max(texts, key=lambda number: told[number].clearness())


def _is_about_copies(last: SnapshotData) -> bool:
    """Whether the text on which heads were measured consists of sequences that are repeated."""
    windows = last.contexts.tokens if last.contexts else []
    halves = [(w[1 : 1 + (len(w) - 1) // 2], w[1 + (len(w) - 1) // 2 :]) for w in windows]
    return bool(halves) and all(second[: len(first)] == first for first, second in halves)


def unit_of(prompt: Prompt) -> str:
    """Returns what a token of a prompt is: "letter", "character", "byte" or "token"."""
    texts = prompt.tokens[1:]
    is_byte = [bool(BYTES_OF_TOKEN.fullmatch(text)) for text in texts]
    single = [byte or len(text) == 1 for byte, text in zip(is_byte, texts, strict=True)]
    if not all(single):
        return "token"
    if any(is_byte):
        return "byte"
    has_no_case = [
        unicodedata.category(c) == "Lo" and unicodedata.bidirectional(c) == "L" for c in texts
    ]
    return "character" if any(has_no_case) else "letter"


def percent(part: float) -> str:
    """Returns a probability for people: "51 %", "<1 %"."""
    if not math.isfinite(part):
        return "unknown"
    return "<1\u00a0%" if 0 < part < 0.005 else f"{100 * part:.0f}\u00a0%"


def number_word(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else f"{count:,}"


def heads_word(count: int) -> str:
    """Returns a number of heads in words: "one head", "four heads"."""
    return f"{number_word(count)} head{'s' * (count != 1)}"


def _marked(before: str, clause: str = "", after: str = "", name: str = "") -> dict:
    """Returns a sentence with a clause in the colour of the heads of a name."""
    if not before:
        clause = _sentence(clause)
    return {"headline": before + clause + after, "marked": clause, "about": name}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


class _Story:
    """The story of one prompt."""

    def __init__(
        self,
        last: SnapshotData,
        number: int,
        history: list[Row],
        rows: list[Row],
        curves: Mapping[str, Sequence],
    ):
        self.last, self.number, self.history, self.rows = last, number, history, rows
        self.curves, self.prompt = curves, last.prompts[number]
        self.layout = "lines" if self.prompt.period else "text"
        self.unit = unit_of(self.prompt)
        self.right = [self._right(row) for row in rows]
        symbols = self.prompt.num_symbols
        self.chance = 1 / symbols if self.prompt.period and symbols else None
        self.cards = self._groups()[:MAX_CARDS]
        self.cards_json = [self._card(group) for group in self.cards] or [self._nameless()]

    # ------------------------------------------------------------------------------ what is known

    def _right(self, row: Row) -> float:
        """Returns the mean probability of the right next token; NaN if it is unknown. Of the
        repeated sequence: in the second copy, where it can be known."""
        if len(row.losses) <= self.number:
            return math.nan
        return self._mean_probability(row.losses[self.number])

    def _mean_probability(self, losses: Sequence[float | None] | np.ndarray) -> float:
        found = np.exp(-np.array(losses, np.float64))
        period = self.prompt.period
        counted = found[period + 1 : 2 * period] if period else found
        return float(counted.mean()) if len(counted) else math.nan

    def _without(self, name: str) -> dict | None:
        """Returns the predictions on this prompt without the heads of a name, if they are known."""
        found = self.last.details.get("without", {}).get(name)
        return found["of_prompts"][self.number] if found else None

    def _groups(self) -> list[Group]:
        """Returns the groups of heads with the same name, those that say most first."""
        table = head_table(self.history, self.last.uniform)
        in_all = self.last.row.names.shape[1]
        found: dict[str, list[dict]] = {}
        for row in table:
            found.setdefault(row["name"], []).append(row)
        groups = []
        for name, rows in found.items():
            if name not in KINDS:
                continue
            heads = [row["layer"] * in_all + row["head"] for row in rows]
            number = ALL_NAMES.index(name)
            is_there = [int((row.names.ravel()[heads] == number).sum()) for row in self.rows]
            groups.append(Group(name, rows, heads, is_there))
        order = list(dict.fromkeys([*FIRST[self.layout], *KINDS]))

        def place(group: Group) -> tuple:
            kind = KINDS[group.name]
            return self._is_elsewhere(group), -kind.telling, order.index(group.name)

        return sorted(groups, key=place)

    def _is_elsewhere(self, group: Group) -> bool:
        """Whether heads do not do on this prompt what their name says."""
        on = STATISTICS[group.name].on if group.name in STATISTICS else ""
        if self.prompt.period:
            return on == "texts"
        return on == "repeated" and all(row["holds_on"] in ("prompts", None) for row in group.rows)

    def _says_little(self, group: Group) -> bool:
        return self._is_elsewhere(group) or group.is_simple

    def clearness(self) -> float:
        """Returns how clearly the heads of the first card do here what their name says."""
        if not self.cards or self.cards[0].name == "positional":
            return 0.0
        group, uniform = self.cards[0], self.prompt.uniform[self.cards[0].name]
        values = self.last.of_prompts[self.number][group.name].ravel()[group.heads]
        mean = float(values.mean())
        return mean - uniform if uniform is not None and math.isfinite(mean) else 0.0

    def _weights(self, heads: Sequence[int]) -> np.ndarray:
        """Returns the mean weights of heads at the last step, (t, t)."""
        codes = self.last.codes[self.number]
        codes = codes.reshape(-1, codes.shape[-1])[list(heads)]
        return triangle_to_square(from_codes(codes).mean(0))

    # ------------------------------------------------------------------------------------- result

    def as_json(self) -> dict:
        return {
            "layout": self.layout,
            "unit": self.unit,
            "shown": self._shown(),
            "note": self._note(),
            "query": self._query(),
            "key_to_picture": self._key_to_picture(),
            "arc": self._arc(),
            "cards": self.cards_json,
            "frames": [self._frame(n) for n in range(len(self.rows))],
            "pace": self._pace(),
            "curve": self._curve(),
            "births": list(self._births()),
        }

    def _shown(self) -> int:
        """Returns the number of leading tokens in the picture."""
        if self.layout == "lines":
            return self.prompt.shown
        length = 0
        for n, token in enumerate(self.prompt.tokens[: self.prompt.shown]):
            length += 1 if BYTES_OF_TOKEN.fullmatch(token) else len(token)
            if n > 2 and length > MAX_CHARACTERS:
                return n
        return self.prompt.shown

    def _note(self) -> str:
        shown, total = self._shown(), len(self.prompt.token_ids)
        if shown < total:
            return f"The picture shows the first {shown} of {total} {self.unit}s."
        return "The prompt is longer; its beginning is shown." if self.prompt.truncated else ""

    def _key_to_picture(self) -> str:
        bars = f"Bars: probability of the right {self.unit}, red: 0\u00a0%, green: 100\u00a0%."
        can_switch = any(self._without(group.name) for group in self.cards)
        switch = " Switch heads off to see what they are for." * can_switch
        return f"{bars} Point at a {self.unit} to see what it attends to.{switch}"

    def _arc(self) -> str:
        """Returns what the last line of the repeated sequence means, if it is clearly drawn: what
        followed the earlier occurrence of the last token is the first token of the second copy."""
        last, first = 2 * self.prompt.period, self.prompt.period + 1
        if not self.prompt.period or self._shown() <= last or not self.cards:
            return ""
        if (
            self.cards[0].name != "induction"
            or self._weights(self.cards[0].heads)[last, first] < 0.3
        ):
            return ""
        before, after = self.prompt.labels[last], self.prompt.labels[first]
        return f"The long arc: after “{before}” the second copy began, with “{after}”."

    def _query(self) -> int:
        """Returns the query token at which the picture stops: near the end of the text, where
        the heads of the cards attend most to single other tokens that are not the first."""
        shown = self._shown()
        if self.layout == "lines":
            return self.prompt.period + 1
        most, taken = np.zeros(shown), np.zeros((shown, shown), bool)
        for place, card in enumerate(self.cards_json):
            weights = self._weights(card["heads"])[:shown, :shown].copy()
            np.fill_diagonal(weights, 0)
            weights[:, 0] = 0
            weights[taken] /= 4  # two cards should not show the same token
            if card["name"] != "previous_token":
                weights[np.arange(1, shown), np.arange(shown - 1)] /= 4
            taken[np.arange(shown), weights.argmax(1)] = True
            most += np.sqrt(weights.max(1)) / (1 + place / 2)
        spaces = np.array([not token.strip() for token in self.prompt.tokens[:shown]])
        most[spaces] /= 2
        first = min(shown - 2, shown * 3 // 5)
        return first + int(most[first : shown - 1].argmax())

    def _card(self, group: Group) -> dict:
        count, them = len(group.heads), "it" if len(group.heads) == 1 else "them"
        note = title_of(group.name, group.rows[0]["tokens_back"] if count == 1 else None)
        since = [row["since_step"] for row in group.rows if row["since_step"] is not None]
        if len(self.history) > 1 and since:
            note += f" · since step {min(since):,}"
        effect, switched = "", None
        if without := self._without(group.name):
            right = self._mean_probability(without["losses"])
            effect = f"without {them}: {percent(right)} right"
            line = self._line(self.rows[-1].step, right)
            switched = self._headline_without(group, right) | {"line": line}
        elif found := self._measured(group.name):
            change = formatted_loss(found["loss_change"], signed=True)
            effect = f"without {them}: loss {change}"
        return {
            "name": group.name,
            "heads": group.heads[:MAX_DRAWN],
            "title": _sentence(f"{heads_word(count)} {self._verb(group, count)}"),
            "note": note,
            "meaning": KINDS[group.name].meaning,
            "lines": self._lines(group),
            "from": self._first_query(group.name),
            "effect": effect,
            "without": switched,
        }

    def _measured(self, name: str) -> dict | None:
        """Returns the result of ablation.py for all heads of a name."""
        groups = (self.last.ablation or {"groups": []})["groups"]
        return next((found for found in groups if found["name"] == name), None)

    def _nameless(self) -> dict:
        """Returns a card of the head that is nearest to a name: no head has one."""
        row = head_table(self.history, self.last.uniform)[0]
        heads = [row["layer"] * self.last.row.names.shape[1] + row["head"]]
        place = f"L{row['layer']} H{row['head']}"
        return {
            "name": "",
            "heads": heads,
            "title": "No head has a name yet",
            "note": f"the lines are of {place}",
            "meaning": "A head gets a name when it attends to certain tokens clearly more than "
            "equal weights on all tokens would.",
            "lines": f"lines: attention of {place}",
            "from": 1,
            "effect": "",
            "without": None,
        }

    def _first_query(self, name: str) -> int:
        """Returns the first query token whose attention is drawn. Heads that look for an earlier
        occurrence find none in the first copy of a repeated sequence."""
        is_repeated = name in STATISTICS and STATISTICS[name].on == "repeated"
        return self.prompt.period + 1 if is_repeated and self.prompt.period else 1

    def _lines(self, group: Group) -> str:
        """Returns what the lines are: "each line is attention of the 4 heads of layer 1"."""
        count = len(group.heads)
        rows = group.rows[:MAX_DRAWN]
        layers = sorted({row["layer"] for row in rows})
        if count == 1:
            return f"lines: attention of L{rows[0]['layer']} H{rows[0]['head']}"
        if count > MAX_DRAWN:
            return f"lines: mean attention of the {MAX_DRAWN} clearest of {count} heads"
        where = (
            f"layer {layers[0]}" if len(layers) == 1 else "layers " + ", ".join(map(str, layers))
        )
        return f"lines: mean attention of the {count} heads in {where}"

    def _frame(self, n: int) -> dict:
        return self._headline(n) | {
            "line": self._line(self.rows[n].step, self.right[n]),
            "named": [group.is_there[n] for group in self.cards] or [1],
        }

    def _line(self, step: int, right: float) -> str:
        known = []
        if math.isfinite(right):
            chance = f" (chance {percent(self.chance)})" if self.chance else ""
            known = [f"right next {self.unit}: {percent(right)}{chance}"]
        return " · ".join([f"step {step:,}", *known])

    # ---------------------------------------------------------------------------------- sentences

    def _has_diverged(self, n: int) -> bool:
        row = self.rows[n]
        has_losses = len(row.losses) > self.number and len(row.losses[self.number])
        return bool(has_losses) and not math.isfinite(self.right[n])

    def _is_guessing(self, right: float) -> bool:
        """Whether the right token is hardly more probable than by chance, or on a text than before
        training."""
        least = self.chance or (self.right[0] if self.rows[0].step == 0 else 0.05)
        return not math.isfinite(right) or right < max(3 * least, 0.1)

    def _headline(self, n: int) -> dict:
        """Returns the sentence of a frame."""
        if self._has_diverged(n):
            return _marked(DIVERGED)
        return self._headline_of_copies(n) if self.layout == "lines" else self._headline_of_text(n)

    def _headline_of_copies(self, n: int) -> dict:
        unit, right = self.unit, self.right[n]
        named = {group.name: group for group in self.cards if group.is_there[n]}
        if right > 0.9:
            learned = f"look where this {unit} stood before, and say what came next."
            return _marked("It has learned to ", "copy", f": {learned}", "induction")
        if "induction" in named:
            count = named["induction"].is_there[n]
            begins = f" begin{'s' * (count == 1)} to look for the same {unit}."
            return _marked("", heads_word(count), begins, "induction")
        telling = [group for group in named.values() if not self._says_little(group)]
        if telling:
            guesses = self._is_guessing(right)
            first = "It still guesses, but " if guesses else f"It knows some {unit}s: "
            return _marked(first, self._does(telling[0], n), ".", telling[0].name)
        if self._is_guessing(right):
            return _marked(f"It reads random {unit}s and has to guess.")
        return _marked(f"It begins to use what it has read: some {unit}s are no longer a guess.")

    def _headline_of_text(self, n: int) -> dict:
        reads, is_last = f"It reads {self.unit} by {self.unit}", n == len(self.rows) - 1
        named = [group for group in self.cards if group.is_there[n]]
        new = [group for group in named if n and not any(group.is_there[:n])]
        telling = [group for group in new if not group.is_simple]
        if telling and not is_last:
            return _marked("", self._does(telling[0], n, begins=True), ".", telling[0].name)
        if named:
            return _marked(f"{reads}, and ", self._does(named[0], n), ".", named[0].name)
        if not self._is_guessing(self.right[n]):
            likely = f"It has learned which {self.unit}s are likely."
            return _marked(f"{likely} No head has found its job yet.")
        return _marked(f"{reads} and has to guess.")

    def _does(self, group: Group, n: int, begins: bool = False) -> str:
        """Returns what the heads with the name do at a frame: "two heads look one letter back".
        begins: "two heads begin to look one letter back"."""
        count = group.is_there[n]
        if begins:
            verb = f"begin{'s' * (count == 1)} to {self._verb(group, 2)}"
        elif group.name == "previous_token" and self.layout == "text":
            never = "never lets go" if count == 1 else "never let go"
            verb = f"{never} of the {self.unit} before"
        else:
            verb = self._verb(group, count)
        return f"{heads_word(count)} {verb}"

    def _verb(self, group: Group, count: int) -> str:
        """Returns the verb phrase of a name, of one head or of several heads."""
        distances = sorted({row["tokens_back"] for row in group.rows if row["tokens_back"]})
        far = " and ".join(map(number_word, distances)) if len(distances) < 3 else "some"
        # A token may be a whole word: then its first token says nothing.
        is_words = group.name == "segment_start" and self.unit == "token"
        verbs = AFTER_PUNCTUATION if is_words else KINDS[group.name].verbs
        return verbs[count > 1].format(unit=self.unit, back=far)

    def _headline_without(self, group: Group, right: float) -> dict:
        """Returns the sentence of the last step without the heads of a group."""
        count, before, floor = len(group.heads), self.right[-1], self.chance or 0.0
        which = "head that" if count == 1 else f"{number_word(count)} heads that"
        which = f"{which} {self._verb(group, count)}"
        if group.name == "induction":
            which = "copying head" if count == 1 else "copying heads"
        kept = (right - floor) / (before - floor) if before > floor else 1.0
        result = ", little changes here."
        if kept < 0.15 and not self._is_guessing(before):
            result = ", it is guessing again."
        elif kept < 0.9:
            result = f", the right {self.unit} gets {percent(right)}, not {percent(before)}."
        return _marked("Without the ", which, result, group.name)

    # ---------------------------------------------------------------------------------- time line

    def _pace(self) -> list[float]:
        """Returns when each frame is shown while the story plays, 0 to 1: where the predictions
        change, it goes slowly."""
        right = np.nan_to_num(self.right)
        parts = np.abs(np.diff(right))
        even = np.full(len(parts), 1 / max(1, len(parts)))
        parts = 0.5 * even + 0.5 * (parts / parts.sum() if parts.sum() > 0 else even)
        return [0.0, *np.cumsum(parts).round(4).tolist()]

    def _curve(self) -> dict:
        """Returns the loss that the time line shows: {title, points: [[step, loss]]}."""
        found, title = [], "loss on the second copy"
        if self.layout == "text":
            names = ("validation loss", "training loss (smoothed)", "training loss")
            finite = {n: [p for p in self.curves.get(n, ()) if math.isfinite(p[1])] for n in names}
            name = max(
                names, key=lambda n: len(finite[n])
            )  # a few points make a curve with corners
            if finite[name]:
                return {"title": name, "points": evenly_spaced(finite[name], MAX_POINTS)}
            title = "loss on this prompt"
        for row in self.history:
            if len(row.losses) > self.number and len(losses := row.losses[self.number]):
                period = self.prompt.period
                found.append(
                    [row.step, float(loss_of_copy(losses, period) if period else losses.mean())]
                )
        points = [[step, round(loss, 4)] for step, loss in found if math.isfinite(loss)]
        return {"title": title, "points": evenly_spaced(points, MAX_POINTS)}

    def _births(self) -> Iterator[dict]:
        """Yields when the first head of each card got its name, {step, name, text}."""
        for group in self.cards:
            number = ALL_NAMES.index(group.name)
            first = next(
                (row for row in self.history if (row.names.ravel()[group.heads] == number).any()),
                None,
            )
            if first and len(self.history) > 1:
                yield {"step": first.step, "name": group.name, "text": title_of(group.name)}
