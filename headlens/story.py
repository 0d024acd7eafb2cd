"""The first screen of the page: a few sentences and what is drawn with them, decided here.

    story(snapshot, steps, history, curves)  # the key "story" of page.run_data

Each prompt has a layout. "lines": the repeated sequence [BOS] + R + R as two rows of tokens, with
lines of attention between them. "text": a passage with one query token, and what each group of
heads attends to there. A card is a group of heads with the same name; its `without` says what the
model does without these heads, if that was recorded (recording.record_without).
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .ablation import most_important
from .finding import events
from .heads import ALL_NAMES, KINDS, MAX_DRAWN, NAMES, head_table, title_of
from .history import Row, copying_step, evenly_spaced, second_copy
from .prompts import BYTES_OF_TOKEN, Prompt
from .rounding import formatted
from .snapshot_data import SnapshotData, from_codes, triangle_to_square
from .statistics import STATISTICS, by_layer

MAX_CARDS = 3
MAX_CHARACTERS = 260  # of a passage in large type
MAX_POINTS = 200  # of the curve
MIN_EFFECT = 0.1  # heads whose removal changes less of the probability do not lead
MAIN_PART = 0.8  # a head that alone causes this part of the change of the loss is named
# Of the names that tell equally much, see Kind.telling, these come first.
FIRST = {"lines": ("induction",), "text": ("segment_start", "induction", "separator")}
AFTER_PUNCTUATION = ("looks at tokens after punctuation", "look at tokens after punctuation")
NO_NAME = "No head has a name"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CURVES = ("validation loss", "training loss (smoothed)", "training loss")  # of a text


@dataclass(frozen=True)
class Group:
    """Heads with the same name at the last step, the clearest first."""

    name: str
    heads: list[int]  # their indices
    is_there: list[int]  # at each frame, how many of all heads have the name
    verbs: tuple[str, str]  # what one of them does, and what several do
    is_here: bool  # whether they do on this prompt what their name says

    def what(self, count: int) -> str:
        """Returns what heads do: "one head looks one letter back"."""
        return f"{heads_word(count)} {self.verbs[count > 1]}"

    def which(self) -> str:
        """Returns the heads: "four heads that copy what came next"."""
        count = len(self.heads)
        return f"{'head' if count == 1 else heads_word(count)} that {self.verbs[count > 1]}"


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
    # Not each snapshot has a frame: rows after the last frame would name other heads than it shows.
    history = [row for row in history if row.step <= last.step] or [last.row]
    table, born = head_table(history, last.uniform), events(history)
    births = {event["key"]: event["step"] for event in reversed(born)}  # the first ones
    told = {
        number: _Story(last, number, history, steps, curves or {}, table, births)
        for number, prompt in enumerate(last.prompts)
        if len(prompt.tokens) > 2
    }
    if not told:
        return None
    repeated = [number for number in told if last.prompts[number].period]
    texts = [number for number in told if number not in repeated]
    # The text that shows the first card best; the repeated sequence if there is no other, or if a
    # model learns to copy from data that are repeated sequences.
    copies = copying_step(last.prompts, history) is not None and _is_about_copies(last)
    opening = repeated[0] if repeated and (copies or not texts) else None
    if opening is None:
        opening = max(texts, key=lambda number: told[number].clearness())
    found = [told[n].as_json() if n in told else None for n in range(len(last.prompts))]
    return {"opening": opening, "prompts": found}


def _is_about_copies(last: SnapshotData) -> bool:
    """Whether the text on which heads were measured consists of sequences that are repeated."""
    windows = [window[1:] for window in last.contexts.tokens] if last.contexts else []
    halves = [(window[: len(window) // 2], window[len(window) // 2 :]) for window in windows]
    return bool(halves) and all(second[: len(first)] == first for first, second in halves)


def unit_of(prompt: Prompt) -> str:
    """Returns what a token of a prompt is: "letter", "character" or "token"."""
    texts = prompt.tokens[1:]
    if any(len(text) != 1 for text in texts):
        return "token"
    kinds = {(unicodedata.category(text), unicodedata.bidirectional(text)) for text in texts}
    others = ("Lo", "L"), ("Nd", "EN")  # letters without case, such as 語; digits
    return "character" if kinds & {*others} else "letter"


def percent(part: float) -> str:
    """Returns a probability for people: "51 %", "0.4 %"."""
    return f"{formatted(100 * part, kind='percent')}\u00a0%"


def number_word(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else f"{count:,}"


def heads_word(count: int) -> str:
    """Returns a number of heads in words: "one head", "four heads"."""
    return f"{number_word(count)} head{'s' * (count != 1)}"


def _marked(before: str, clause: str = "", after: str = "", name: str = "") -> dict:
    """Returns a sentence with a clause in the colour of the heads of a name."""
    clause = clause if before else _sentence(clause)
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
        steps: Sequence[int],
        curves: Mapping[str, Sequence],
        table: list[dict],
        births: dict[str, int],
    ):
        self.last, self.number, self.history, self.curves = last, number, history, curves
        self.table, self.births = table, births
        self.values = last.of_prompts[number]
        known = [row.step for row in history]
        before = np.searchsorted(known, steps, side="right") - 1
        self.rows = [history[max(0, at)] for at in before]  # of each frame
        self.prompt = last.prompts[number]
        self.is_text = not self.prompt.period
        self.unit = unit_of(self.prompt)
        self.right = [self._right(self._losses(row)) for row in self.rows]
        self.knows_losses = any(len(self._losses(row)) for row in self.rows)
        # Of the repeated sequence; on a text, what it knows before training.
        self.chance = 0.05 if self.rows[0].step else self.right[0]
        if self.prompt.period and self.prompt.num_symbols:
            self.chance = 1 / self.prompt.num_symbols
        self.most_needed = ""  # a name that leads because the model needs its heads most
        self.cards = self._needed_first(self._groups())[:MAX_CARDS]
        self.cards_json = [self._card(group) for group in self.cards] or [self._nameless()]

    # ------------------------------------------------------------------------------ what is known

    def _losses(self, row: Row, most: int | None = None) -> np.ndarray:
        """Returns the losses of the next tokens, [] if they are unknown. Of the repeated sequence:
        in the second copy, where the next token can be known."""
        known = len(row.losses) > self.number
        return self._counted(row.losses[self.number][:most] if known else np.zeros(0))

    def _counted(self, losses: np.ndarray) -> np.ndarray:
        return losses if self.is_text else second_copy(losses, self.prompt.period)

    def _right(self, losses: np.ndarray) -> float:
        """Returns the mean probability of the right next token; NaN if it is unknown."""
        return float(np.exp(-losses.astype(np.float64)).mean()) if len(losses) else math.nan

    def _without(self, name: str) -> tuple[float, float] | None:
        """Returns the same at the last step with and without the heads of a name, None if that was
        not recorded."""
        if not (found := self.last.details.get("without", {}).get(name)):
            return None
        losses = np.array(found["of_prompts"][self.number]["losses"], np.float64)
        # Those without heads are of the shown tokens.
        before = self._right(self._losses(self.rows[-1], len(losses)))
        return before, self._right(self._counted(losses))

    def _needed_first(self, groups: list[Group]) -> list[Group]:
        """Returns the groups in the same order. But if the model predicts as well without the
        first, the one that it needs most is first."""
        effects = {}
        for group in groups:
            before, right = self._without(group.name) or (0, 0)
            if group.is_here and before > 0 and math.isfinite(right):
                effects[group.name] = abs(before - right) / before
        most = max(effects, key=effects.__getitem__, default="")
        if groups and effects.get(groups[0].name, 1) < MIN_EFFECT <= effects[most]:
            self.most_needed = most
            return sorted(groups, key=lambda group: group.name != most)
        return groups

    def _index(self, row: Mapping) -> int:
        layer, head = row["place"]
        return layer * self.last.row.names.shape[1] + head

    def _groups(self) -> list[Group]:
        """Returns the groups of heads with the same name, those that say most first, and last those
        that do not do on this prompt what their name says."""
        groups = []
        for name, kind in KINDS.items():
            rows = [row for row in self.table if row["name"] == name]
            if not rows:
                continue
            is_there = [int((row.names == ALL_NAMES.index(name)).sum()) for row in self.rows]
            backs = sorted({row["tokens_back"] for row in rows if row["tokens_back"]})
            far = " and ".join(map(number_word, backs)) if len(backs) < 3 else "some"
            # A token may be a whole word: then its first token says nothing.
            is_words = name == "segment_start" and self.unit == "token"
            verbs = AFTER_PUNCTUATION if is_words else kind.verbs
            one, several = (verb.format(unit=self.unit, back=far) for verb in verbs)
            on = STATISTICS[name].on
            is_here = on != "texts"
            if self.is_text:
                is_here = on != "repeated" or any("text" in (r["holds_on"] or "") for r in rows)
            heads = [self._index(row) for row in rows]
            groups.append(Group(name, heads, is_there, (one, several), is_here))
        order = [*FIRST["text" if self.is_text else "lines"], *KINDS]

        def place(group: Group) -> tuple:
            return not group.is_here, -KINDS[group.name].telling, order.index(group.name)

        return sorted(groups, key=place)

    def clearness(self) -> float:
        """Returns how clearly the heads of the first card do here what their name says."""
        if not self.cards or self.cards[0].name not in NAMES:
            return 0.0
        name, values = self.cards[0].name, self.values[self.cards[0].name]
        above = values - np.nan_to_num(by_layer(self.prompt.uniform[name]))
        clear = float(above.ravel()[self.cards[0].heads].mean())
        return clear if math.isfinite(clear) else 0.0

    def _weights(self, heads: Sequence[int]) -> np.ndarray:
        """Returns the mean weights of heads at the last step, (t, t)."""
        codes = self.last.codes[self.number]
        codes = codes.reshape(-1, codes.shape[-1])[list(heads)]
        return triangle_to_square(from_codes(codes).mean(0))

    # ------------------------------------------------------------------------------------- result

    def as_json(self) -> dict:
        return {
            "layout": "text" if self.is_text else "lines",
            "unit": self.unit,
            "shown": self._shown(),
            "note": self._note(),
            "rows": [
                "first copy, after the start ○: what it has read",
                f"the same {self.unit}s again: what it must predict",
            ],
            "query": self._query(),
            # The first token whose probability counts, see history.second_copy.
            "predicted_from": 1 if self.is_text else self.prompt.period + 2,
            "key_to_picture": self._key_to_picture(),
            "arc": self._arc(),
            "cards": self.cards_json,
            "frames": [
                self._headline(n)
                | {
                    "line": self._line(self.rows[n].step, right),
                    "named": [group.is_there[n] for group in self.cards] or [1],
                    "titles": [
                        _sentence(group.what(group.is_there[n] or len(group.heads)))
                        for group in self.cards
                    ]
                    or [NO_NAME],
                }
                for n, right in enumerate(self.right)
            ],
            "pace": self._pace(),
            "curve": self._curve(),
            "births": [
                {"step": self.births[card.name], "name": card.name, "text": title_of(card.name)}
                for card in self.cards
                if len(self.history) > 1
            ],
        }

    def _shown(self) -> int:
        """Returns the number of leading tokens in the picture."""
        if not self.is_text:
            return self.prompt.shown
        tokens = self.prompt.tokens[: self.prompt.shown]
        lengths = [1 if BYTES_OF_TOKEN.fullmatch(token) else len(token) for token in tokens]
        return max(3, int((np.cumsum(lengths) <= MAX_CHARACTERS).sum()))

    def _note(self) -> str:
        shown, total = self._shown(), len(self.prompt.token_ids)
        if shown < total:
            return f"The picture shows the first {shown} of {total} {self.unit}s."
        return "The prompt is longer; its beginning is shown." if self.prompt.truncated else ""

    def _key_to_picture(self) -> str:
        bars = f"Bars: probability of the right {self.unit}, red 0\u00a0%, green 100\u00a0%. "
        bars *= self.knows_losses
        can_switch = any(card["without"] for card in self.cards_json)
        switch = " Switch heads off to see what they are for." * can_switch
        return f"{bars}Point at a {self.unit} or a card; click to keep it.{switch}"

    def _arc(self) -> str:
        """Returns what the last line of the repeated sequence means, if it is clearly drawn: what
        followed the earlier occurrence of the last token is the first token of the second copy."""
        last, first = 2 * self.prompt.period, self.prompt.period + 1
        if self.is_text or self._shown() <= last or not self.cards:
            return ""
        copying = self.cards[0]
        if copying.name != "induction" or self._weights(copying.heads)[last, first] < 0.3:
            return ""
        before, after = self.prompt.labels[last], self.prompt.labels[first]
        return f"The long arc: after “{before}” the second copy began, with “{after}”."

    def _query(self) -> int:
        """Returns the query token at which the picture stops: near the end of the text, where
        the heads of the cards attend most to single other tokens that are not the first."""
        shown = self._shown()
        if not self.is_text:
            return self.prompt.period + 1
        most = np.zeros(shown)
        for place, card in enumerate(self.cards_json):
            weights = self._weights(card["heads"])[:shown, :shown]
            most += np.sqrt(np.tril(weights, -1)[:, 1:].max(1)) / (1 + place / 2)
        spaces = np.array([not token.strip() for token in self.prompt.tokens[:shown]])
        most[spaces] /= 2
        first = min(shown - 2, shown * 3 // 5)
        return first + int(most[first : shown - 1].argmax())

    def _card(self, group: Group) -> dict:
        count, name = len(group.heads), group.name
        row = next(row for row in self.table if row["name"] == name)
        note = title_of(name, row["tokens_back"] if count == 1 else None)
        step, last = self.births[name], self.rows[-1].step
        their, them = ("its", "it") if count == 1 else ("their", "them")
        known, switched = [], None
        if math.isfinite(share := self._share(group)):
            known.append(f"{percent(share)} of {their} attention")
        if found := self._without(name):
            main = self._main_head(group)
            mostly = f" (mostly {main})" * bool(main)
            known.append(f"right {self.unit} {percent(found[1])} without {them}{mostly}")
            switched = self._headline_without(group, *found)
            switched |= {"line": self._line(last, found[1]), "others": self._others(group)}
        lines = f"lines: mean attention of {number_word(min(count, MAX_DRAWN))} heads"
        if count == 1:
            lines = f"lines: attention of {self._place(group.heads[0])}"
        is_repeated = self.prompt.period and STATISTICS[name].on == "repeated"
        return {
            "name": name,
            "heads": group.heads[:MAX_DRAWN],
            "title": _sentence(group.what(count)),
            "places": self._place(group.heads[0]) + f"\u00a0+\u00a0{count - 1}" * (count > 1),
            "note": note,
            "early": f"{note}, from step\u00a0{step:,}",
            "since": step,
            "meaning": KINDS[name].meaning,
            "lines": lines,
            # Heads that look for an earlier occurrence find none in the first copy.
            "from": self.prompt.period + 1 if is_repeated else 1,
            "effect": "; ".join(known),
            "without": switched,
        }

    def _nameless(self) -> dict:
        """Returns a card of the head that is nearest to a name: no head has one."""
        row = self.table[0]
        head = self._index(row)
        return {
            "name": "",
            "heads": [head],
            "title": NO_NAME,
            "places": self._place(head),
            "note": "nearest to a name",
            "early": "",
            "since": 0,
            "meaning": "A name needs clearly more weight on certain tokens than on all others.",
            "lines": f"lines: attention of {self._place(head)}",
            "from": 1,
            "effect": "",
            "without": None,
        }

    # ---------------------------------------------------------------------------------- sentences

    def _line(self, step: int, right: float) -> str:
        when = [f"step {step:,}"] * (step > 0 or len(self.rows) > 1)
        if not math.isfinite(right):
            return "".join(when)
        known = f"; chance {percent(self.chance)}" if self.prompt.num_symbols else ""
        if self.is_text and step and not self.rows[0].step:
            known = f"; before training {percent(self.chance)}"
        gets = f"the right {self.unit} gets {percent(right)}"
        return " · ".join([*when, f"{gets} (mean probability here{known})"])

    def _is_guessing(self, right: float) -> bool:
        """Whether the right token is hardly more probable than by chance."""
        return not math.isfinite(right) or right < max(3 * np.nan_to_num(self.chance), 0.1)

    def _headline(self, n: int) -> dict:
        """Returns the sentence of a frame."""
        unit, right, guesses = self.unit, self.right[n], self._is_guessing(self.right[n])
        reads = f"It reads {unit} by {unit}" if self.is_text else f"It reads random {unit}s"
        is_last = n == len(self.rows) - 1
        named = [group for group in self.cards if group.is_there[n] and group.is_here]
        new = [g for g in named if n and not any(g.is_there[:n]) and KINDS[g.name].telling]
        new = [] if is_last else new
        copying = [g for g in named if g.name == "induction" and not self.is_text]
        group = next(iter(copying or new or named), None)
        count = group.is_there[n] if group else 0
        heads, ending = heads_word(count), "s" * (count == 1)

        if len(self._losses(self.rows[n])) and not math.isfinite(right):
            return _marked("This model has diverged: its losses are not numbers.")
        if not self.is_text and right > 0.9:
            copies = f": look where this {unit} stood before, and say what came next."
            return _marked("It has learned to ", "copy", copies, "induction")
        if group and copying:
            looks = f"begin{ending} to look" if right <= 0.5 else f"look{ending}"
            return _marked("", f"{heads} {looks}", " at what came next last time.", group.name)
        if is_last and not self.is_text and guesses and self.knows_losses:
            return _marked(
                f"Random {unit}s, written twice: this model has not learned to copy them."
            )
        if group and new:
            return _marked("", f"{heads} begin{ending} to {group.verbs[1]}", ".", group.name)
        if group and is_last and group.name == self.most_needed:
            which = f"{'the ' * (count == 1)}{group.which()}"
            if main := self._main_head(group):
                which = f"{main}, a head that {group.verbs[0]}"
            return _marked("Here its guesses depend most on ", which, ".", group.name)
        if group:
            before = f"{reads}, and " if self.knows_losses else ""
            return _marked(before, group.what(count), ".", group.name)
        if not self.knows_losses:
            return _marked(f"What the heads attend to, {unit} by {unit}.")
        if guesses:
            return _marked(f"{reads} and has to guess.")
        if not self.is_text:
            return _marked(
                f"It begins to use what it has read: some {unit}s are no longer a guess."
            )
        has_name = np.isin(self.rows[n].names, [ALL_NAMES.index(name) for name in KINDS]).any()
        without = f" {NO_NAME}." * (not has_name)
        return _marked(f"It has learned which {unit}s are likely.{without}")

    def _headline_without(self, group: Group, before: float, right: float) -> dict:
        """Returns the sentence of the last step without the heads of a group. before, right: the
        probability of the right token with and without them."""
        floor = self.chance if self.prompt.num_symbols else 0.0
        lost = (before - right) / max(before - floor, floor, 1e-9)
        result = f", the right {self.unit} stays as likely here."
        if lost > 0.85 and not self._is_guessing(before):
            result = ", it is no better than guessing."
        elif abs(lost) > 0.1 and percent(right) != percent(before):
            result = f", the right {self.unit} gets {percent(right)}, not {percent(before)}."
        return _marked("Without the ", group.which(), result, group.name)

    def _place(self, head: int) -> str:
        return self.last.row.head_name(head).replace(" ", "\u00a0")

    def _share(self, group: Group) -> float:
        """Returns the part of their attention with which the heads of a group do here what their
        name says; NaN if it is not known."""
        is_share = STATISTICS[group.name].of == "targets"
        return float(self.values[group.name].ravel()[group.heads].mean()) if is_share else math.nan

    def _main_head(self, group: Group) -> str:
        """Returns the head that alone does nearly all that the model needs of a group, or ""."""
        found = self.last.measured
        whole = most_important(g for g in found.get("groups", ()) if g["name"] == group.name)
        if whole is None or len(group.heads) == 1:
            return ""
        changes = [one["loss_change"] for one in found["heads"]]
        main = max(group.heads, key=lambda head: changes[head])
        return self._place(main) if changes[main] >= MAIN_PART * whole["loss_change"] else ""

    def _others(self, group: Group) -> str:
        """Returns how the attention of the other cards changes without the heads of a group."""
        attention = self.last.details["without"][group.name].get("attention") or {}
        changes = [
            (before, after, other)
            for other in self.cards
            if other.name != group.name and other.name in attention
            if (after := attention[other.name]["values"][self.number]) is not None
            if math.isfinite(before := self._share(other))
        ]
        if not changes:
            return ""
        before, after, other = max(changes, key=lambda change: abs(change[0] - change[1]))
        if abs(before - after) < MIN_EFFECT:
            return "The attention of the other heads hardly changes."
        do, their = ("does", "its") if len(other.heads) == 1 else ("do", "their")
        parts = f"{percent(after)} of {their} attention, not {percent(before)}"
        return f"Then the {other.which()} {do} that with {parts}."

    # ---------------------------------------------------------------------------------- time line

    def _pace(self) -> list[float]:
        """Returns when each frame is shown while the story plays, 0 to 1: where the predictions
        change, it goes slowly."""
        parts = np.abs(np.diff(np.nan_to_num(self.right)))
        even = np.full(len(parts), 1 / max(1, len(parts)))
        parts = 0.5 * even + 0.5 * (parts / parts.sum() if parts.sum() > 0 else even)
        return [0.0, *np.cumsum(parts).round(4).tolist()]

    def _curve(self) -> dict:
        """Returns the loss that the time line shows: {title, points: [[step, loss]]}. Of those of a
        text the one with the most points: a few points make a curve with corners."""
        title, points = "loss on the second copy", []
        if self.is_text:
            known = [(name, self.curves.get(name, ())) for name in CURVES]
            finite = [(name, [p for p in of if math.isfinite(p[1])]) for name, of in known]
            title, points = max(finite, key=lambda pair: len(pair[1]))
            title = title if points else "loss on this prompt"
        if not points:
            losses = [(row.step, self._losses(row)) for row in self.history]
            means = [(step, float(of.mean())) for step, of in losses if len(of)]
            points = [(step, round(mean, 4)) for step, mean in means if math.isfinite(mean)]
        return {"title": title, "points": evenly_spaced(points, MAX_POINTS)}
