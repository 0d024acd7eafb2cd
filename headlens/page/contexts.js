/* Where a head does what it does: lines of the text around a query token and its key token, and the
 * pairs of words that it connects most often. Python chooses all of them
 * (headlens/whole_text.py, headlens/connected.py). */

import { formatWeight, plural } from "./text.js";
import { $, bold, make } from "./dom.js";
import { B, indexInB, selected, sideName, textName, valueAt } from "./state.js";
import { shownSide } from "./names.js";
import { ATTENTION, WEIGHTS, colours, height, shade } from "./colours.js";

function lineOfCell({ texts, labels }, [, query, key, code, ...ends]) {
  const weight = formatWeight(WEIGHTS[code]);
  const marked = (n) => {
    const isKey = n === key;
    const node = make(isKey ? "mark" : "u", { textContent: texts[n].trim() ? texts[n] : labels[n],
      title: `${isKey ? "key" : "query"} token ${labels[n]}, position ${n}` });
    if (isKey) shade(node, ATTENTION, height(WEIGHTS[code]));
    return node;
  };
  const line = make("bdi", {}, "…\u00a0");
  const after = make("span", { className: "after" });
  const textOf = (first, end) => texts.slice(first, end).join("");
  for (let part = 0; part < ends.length; part += 2) {
    if (part) line.append(" … ");
    let from = ends[part];
    for (const n of [key, query]) {
      if (n < from || n >= ends[part + 1]) continue;
      line.append(textOf(from, n), marked(n));
      from = n + 1;
    }
    (from > query ? after : line).append(textOf(from, ends[part + 1]));
  }
  line.append(after, "\u00a0…");
  return make("li", {}, make("span", { className: "number", textContent: weight }), line);
}

function listOf(title, about, cells, windows) {
  const lines = cells.map((cell) => lineOfCell(windows[cell[0]], cell));
  return make("div", {}, make("h4", {}, title, make("span", { textContent: ` ${about}` })),
    make("ol", {}, ...(lines.length ? lines : [make("li", { textContent: "nowhere" })])));
}

/** Returns the table of the pairs that a head connects most often. */
function pairTable({ queries, texts, of_heads: ofHeads }, index) {
  const { links, keys } = ofHeads[index];
  const head = ["key", "times", "from the queries"].map((textContent) =>
    make("th", { scope: "col", textContent }));
  const rows = keys.map(([key, count, from]) => make("tr", {},
    make("th", { scope: "row" }, make("mark", {}, make("bdi", { textContent: texts[key] }))),
    make("td", { className: "number", textContent: count }),
    make("td", {}, ...from.flatMap(([query, times]) =>
      [make("bdi", { textContent: texts[query] }), make("small", { textContent: ` ${times} ` }), " "]))));
  return make("div", { id: "pairs" },
    make("h4", {}, "words it connects most often", make("span", { textContent:
      ` ${plural(links, "query token")} of ${queries} with a weight of at least 0.2` })),
    rows.length ? make("table", {}, make("thead", {}, make("tr", {}, ...head)),
      make("tbody", {}, ...rows)) : make("p", { textContent: "no pair twice" }));
}

/** Returns how much of the attention of a head is on tokens that no line shows. */
function restText(of, index) {
  const [first, self] = ["first_token", "diagonal"].map((key) => valueAt(of, key, index) ?? 0);
  const percent = Math.round(100 * (first + self));
  return `Not shown: attention to the first token and to the token itself, ${percent} % of all. `;
}

let shownContexts = []; // what the shown lines depend on

/** Shows the contexts of the enlarged head. */
export function drawContexts() {
  const of = selected() === null ? null : shownSide();
  const index = of === B && B ? indexInB(selected()) : selected();
  const { windows, textSigns } = of?.run ?? {};
  const isCell = ([window, query, key]) => key >= 0 && key < query && query < windows[window]?.length;
  const { contexts, pairs } = (windows && of.facts) || {};
  const [most, some] = contexts?.[index]?.map((list) => list.filter(isCell)) ?? [];
  $("contexts").hidden = !some;
  if (!some) return;
  const depends = [of.facts, index, B && sideName(of), colours.isDark];
  if (depends.every((value, n) => value === shownContexts[n])) return; // selected text stays
  shownContexts = depends;
  $("contexts").replaceChildren(
    make("h3", { id: "contexts-title" }, "Where does it do that?",
      ...(B ? [" ", bold(sideName(of))] : [])),
    make("p", {}, `In ${textName()}: the `, make("u", { textContent: "query token" }), " attends to the ",
      make("mark", { textContent: "key token" }), ", with the weight in front of the line."),
    make("div", { className: "lists" },
      listOf("five strongest", of.norms ? "largest weight × norm of the value" : "largest weight",
        most, windows),
      ...(pairs ? [pairTable(pairs, index)] : []),
      listOf("five at random", "the same query tokens for all heads", some, windows)),
    make("p", { className: "note", textContent: restText(of, index) + textSigns }));
}
