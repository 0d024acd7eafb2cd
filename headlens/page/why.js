/* "Why here?": the exact parts of an attention score of a typed text, see headlens/parts.py. What a head
 * reads was written by the token, by its position and by earlier heads and MLPs; a score is a sum over
 * pairs of what wrote the query and what wrote the key. */

import { format, formatWeight } from "./text.js";
import { $, bold, make, quotedToken, showMessage } from "./dom.js";
import { A, headName, here, run, selected, selectedQuery, state } from "./state.js";
import { nameAt, setColour } from "./names.js";
import { weight } from "./data.js";
import { select } from "./grid.js";
import { partsOf } from "./typing.js";

const SHOWN = 5; // pairs
const CLEAR = 0.3; // of the sum: a pair with less is no explanation

let shownFor = ""; // text, step, heads and cell of the shown parts

const stateOf = (query, key) => [run.version, state.frame, selected(), query, key].join();

/** Shows the button, and removes parts of another text, step or head. */
export function drawWhy() {
  const isPossible = Boolean(run.isTyped) && selected() !== null && !state.more.length;
  $("why").hidden = !isPossible;
  if (!isPossible || shownFor.split(",").slice(0, 3).join() !== stateOf().split(",").slice(0, 3).join()) {
    $("why-parts").replaceChildren();
    shownFor = "";
  }
}

/** Shows why the enlarged head attends from a query token to a key token. */
export async function explain(query, key) {
  if ($("why").hidden) return;
  const { layer, head } = state;
  const wanted = shownFor = stateOf(query, key);
  try {
    const found = await partsOf(layer, head, query, key);
    if (shownFor === wanted) showParts(found, query, key);
  } catch (error) {
    if (shownFor === wanted) showMessage(error.message);
  }
}

/** Returns the nodes that name what wrote a part at a token. after: the sign after the name of a head. */
function writer({ kind, layer, head }, label, after = "") {
  if (kind === "head") {
    const index = layer * run.heads + head;
    const name = nameAt(here, index);
    const open = make("button", { textContent: headName(index), title: "show this head",
      onclick: () => select(index) });
    setColour(open, name?.key);
    return [open, ...(name ? [`, ${/^[aeiou]/.test(name.title) ? "an" : "a"} ${name.title}${after}`] : [])];
  }
  if (kind === "token") return ["the token ", quotedToken(label)];
  return [{ position: "the position", mlp: `the MLP of L${layer}`, biases: "the biases" }[kind]];
}

function showParts({ score, mean, sources, pairs }, query, key) {
  const total = score - mean;
  const [ofQuery, ofKey] = [A.labels[query], A.labels[key]];
  const percent = (value) => `${format((100 * value) / total, false, "percent")}\u00a0%`;
  const [[first, second, most]] = pairs;
  const cell = formatWeight(weight(run, state.frame, 0, selected(), query, key));
  const said = [bold(headName(selected())), " attends from ", quotedToken(ofQuery), " to ",
    quotedToken(ofKey), ` with weight ${cell}`];
  if (total > 0 && most / total >= CLEAR) {
    const wrote = ({ kind }) => (kind === "head" || kind === "mlp" ? " wrote" : " says");
    said.push(", mostly because what ", ...writer(sources[second], ofKey, ","), wrote(sources[second]),
      " there matches what ", ...writer(sources[first], ofQuery, ","), wrote(sources[first]), " at ",
      quotedToken(ofQuery), ` (${percent(most)} of the score).`);
  } else said.push(total > 0 ? ". No single part explains it; the largest are below."
    : ". Its score is below the mean of the row.");
  const cells = ([i, j, value]) => {
    const bar = make("i");
    bar.style.width = `${Math.min(100, (100 * Math.abs(value)) / Math.abs(most))}%`;
    return make("tr", { className: value < 0 ? "less" : "" },
      make("td", {}, ...writer(sources[i], ofQuery)), make("td", {}, ...writer(sources[j], ofKey)),
      make("td", { className: "number" }, make("span", { className: "track" }, bar),
        format(value, true)));
  };
  const rest = total - pairs.slice(0, SHOWN).reduce((sum, [, , value]) => sum + value, 0);
  const head = ["query, written by", "key, written by", "part of the score"].map((textContent) =>
    make("th", { scope: "col", textContent }));
  const last = (text, value) => make("tr", {}, make("th", { scope: "row", colSpan: 2, textContent: text }),
    make("td", { className: "number", textContent: format(value, true) }));
  $("why-parts").replaceChildren(make("p", {}, ...said), make("table", {},
    make("thead", {}, make("tr", {}, ...head)), make("tbody", {},
      ...pairs.slice(0, SHOWN).map(cells), last("all other pairs", rest),
      last("score, above the mean of the row", total))));
}

/** Explains the cell to which the query token attends most, or the one that was clicked. */
export function buildWhy(strongestKey) {
  $("why-ask").addEventListener("click", () => {
    const query = selectedQuery();
    explain(query, strongestKey(query));
  });
}
