/* Where a head does what it does: cells of windows of the text, each as a line around its query token
 * and its key token. headlens/whole_text.py chooses the cells. */

import { explainSigns, formatWeight, label, visible } from "./text.js";
import { $, bold, make } from "./dom.js";
import { A, B, here, indexInB, selected, sideName, state, textName, valueAt } from "./state.js";
import { ATTENTION, WEIGHTS, colours, height, shade } from "./colours.js";

// Least number of characters on a line: before the first token, on each side of omitted tokens, and
// after the query token. More characters between the two tokens are omitted.
const [BEFORE, BESIDE, AFTER, BETWEEN] = [14, 10, 10, 24];

/** Returns the side whose contexts are shown: that of the grid. */
const sideOfContexts = () => (!B || state.show === "difference" ? here : state.show === "b" ? B : A);

/** Returns how many tokens from a position on, in a direction, have at least a number of characters. */
function count(tokens, from, by, characters) {
  let length = 0;
  let n = from;
  for (; n >= 0 && n < tokens.length && length < characters; n += by) length += tokens[n].text.length;
  return Math.abs(n - from);
}

/** Returns the ranges of tokens of a line, [first, end]: omitted tokens are between two ranges. */
function rangesOf(tokens, query, key) {
  const first = key - count(tokens, key - 1, -1, BEFORE);
  const end = query + 1 + count(tokens, query + 1, 1, AFTER);
  const between = tokens.slice(key + 1, query).reduce((sum, { text }) => sum + text.length, 0);
  const left = key + 1 + count(tokens, key + 1, 1, BESIDE);
  const right = query - count(tokens, query - 1, -1, BESIDE);
  return between <= BETWEEN || left >= right ? [[first, end]] : [[first, left], [right, end]];
}

/** Returns a token as part of a line. */
const textOf = ({ text }) => (text.trim() ? visible(text) : text && label(text));

function lineOfCell(tokens, [, query, key, code]) {
  const weight = formatWeight(WEIGHTS[code]);
  const ranges = rangesOf(tokens, query, key);
  const marked = (n) => {
    const isKey = n === key;
    const node = make(isKey ? "mark" : "u", { textContent: label(tokens[n].label, 24),
      title: `${isKey ? "key" : "query"} token, position ${n}` });
    if (isKey) shade(node, ATTENTION, height(WEIGHTS[code]));
    return node;
  };
  const after = make("span", { className: "after" });
  const line = make("bdi", {}, ranges[0][0] > 0 ? "…" : "");
  ranges.forEach(([first, end], part) => {
    if (part) line.append(/^\s/.test(tokens[first].text) ? " …" : " … ");
    for (let n = first; n < end; n++) {
      if (n === query || n === key) line.append(marked(n));
      else (n > query ? after : line).append(textOf(tokens[n]));
    }
  });
  after.append(ranges.at(-1)[1] < tokens.length ? "…" : "");
  line.append(after);
  return make("li", {}, make("span", { className: "number", textContent: weight }), line);
}

function listOf(title, about, cells, windows) {
  const lines = cells.map((cell) => lineOfCell(windows[cell[0]], cell));
  return make("div", {}, make("h4", {}, title, make("span", { textContent: ` ${about}` })),
    make("ol", {}, ...(lines.length ? lines : [make("li", { textContent: "nowhere" })])));
}

/** Returns how much of the attention of a head is on tokens that no line shows. */
function restText(of, index) {
  const [first, self] = ["first_token", "diagonal"].map((key) => valueAt(of, key, index, true) ?? 0);
  const percent = Math.round(100 * (first + self));
  return `Not shown: attention to the first token and to the token itself, ${percent} % of all. `;
}

/** Returns the tokens on the lines of some cells. */
const tokensOn = (cells, windows) => cells.flatMap(([window, query, key]) =>
  rangesOf(windows[window], query, key).flatMap((range) => windows[window].slice(...range)));

let shownContexts = []; // what the shown lines depend on

/** Shows the contexts of the enlarged head. */
export function drawContexts() {
  const of = selected() === null ? null : sideOfContexts();
  const index = of === B && B ? indexInB(selected()) : selected();
  const windows = of?.run.windows;
  const isCell = ([window, query, key]) => key >= 0 && key < query && query < windows[window]?.length;
  const cells = windows ? of.facts.contexts?.[index] : null;
  const [most, some] = cells?.map((list) => list.filter(isCell)) ?? [];
  $("contexts").hidden = !some;
  if (!some) return;
  const depends = [of.facts, index, B && sideName(of), state.scale, colours.isDark];
  if (depends.every((value, n) => value === shownContexts[n])) return; // selected text stays
  shownContexts = depends;
  const isOfLetters = windows[0].slice(1).every(({ text }) => [...text].length === 1);
  $("contexts").classList.toggle("mono", isOfLetters);
  const tokens = tokensOn([...most, ...some], windows);
  const signs = explainSigns(tokens.map(({ text }) => text), tokens.map((one) => one.label));
  $("contexts").replaceChildren(
    make("h3", { id: "contexts-title" }, "Where does it do that?",
      ...(B ? [" ", bold(sideName(of))] : [])),
    make("p", {}, `In ${textName()}: the `, make("u", { textContent: "query token" }), " attends to the ",
      make("mark", { textContent: "key token" }), ", with the weight in front of the line."),
    make("div", { className: "lists" },
      listOf("five strongest", of.norms ? "largest weight × norm of the value" : "largest weight",
        most, windows),
      listOf("five at random", "the same query tokens for all heads", some, windows)),
    make("p", { className: "note", textContent: restText(of, index) + signs }));
}
