/* "Why here?": the exact parts of an attention score of a typed text, see headlens/parts.py. What a head
 * reads was written by the token, by its position and by earlier heads and MLPs; a score is a sum over
 * pairs of what wrote the query and what wrote the key. */

import { format, formatWeight } from "./text.js";
import { bold, make, quotedToken, showMessage } from "./dom.js";
import { headName, here, layerName, placeOfHead, run, state, update } from "./state.js";
import { nameAt, setColour } from "./names.js";
import { weight } from "./data.js";
import { partsOf } from "./typing.js";

const SHOWN = 5; // pairs
const CLEAR = 0.3; // of the sum: a pair with less is no explanation

/** Removes the parts in a box if they are of another text, step or `what`, such as a head. */
export function clearWhy(box, what) {
  const now = [run.version, state.frame, what].join();
  if (box.shownFor === now) return;
  box.replaceChildren();
  Object.assign(box, { shownFor: now, asked: null });
}

/** Shows in a box why a head attends from a query token to a key token. */
export async function explain(box, index, query, key) {
  const cell = [index, query, key].join();
  const isShown = box.children.length && box.cell === cell;
  const asked = box.asked = {};
  box.replaceChildren();
  if (isShown) return; // a second click closes it
  box.cell = cell;
  try {
    const { layer, head } = placeOfHead(index);
    const found = await partsOf(layer, head, query, key);
    if (box.asked !== asked) return;
    box.replaceChildren(...explanation(found, index, query, key));
    box.scrollIntoView({ block: "nearest" });
  } catch (error) {
    if (box.asked === asked) showMessage(error.message);
  }
}

/** Returns the nodes that name what wrote a part at a token: a table has no sentence around it. */
function writer({ kind, layer, head }, inSentence) {
  if (kind !== "head") {
    return [kind === "mlp" ? `${inSentence ? "what " : ""}the MLP of ${layerName(layer)}${inSentence ? " wrote" : ""}`
      : `the ${kind}`];
  }
  const index = layer * run.heads + head;
  const name = nameAt(here, index);
  const open = make("button", { textContent: headName(index), title: "show this head",
    onclick: () => update({ view: "all", ...placeOfHead(index) }) });
  setColour(open, name?.key);
  const title = name ? `, ${/^[aeiou]/.test(name.title) ? "an" : "a"} ${name.title}` : "";
  return inSentence ? ["what ", open, title && `${title},`, " wrote"] : [open, title];
}

function explanation({ score, mean, sources, pairs }, index, query, key) {
  const total = score - mean;
  const { labels } = run.prompts[0];
  const [ofQuery, ofKey] = [labels[query], labels[key]];
  const [[first, second, most]] = pairs;
  const cell = formatWeight(weight(run, state.frame, 0, index, query, key));
  const said = [bold(headName(index)), " attends from ", quotedToken(ofQuery), ` (${query}) to `,
    quotedToken(ofKey), ` (${key}) with weight ${cell}`];
  if (total > 0 && most / total >= CLEAR) {
    said.push(", mostly because of ", ...writer(sources[second], true), " there and ",
      ...writer(sources[first], true), " at ", quotedToken(ofQuery), ` (${format(most, true)} of ${format(total, true)}).`);
  } else if (query === 0) {
    return [make("p", {}, ...said, ": it is the first token, so there is no other one.")];
  } else said.push(total > 0 ? ". No single part explains it; the largest are below."
    : ". Its score is below the mean of the row.");
  const cells = ([i, j, value]) => {
    const bar = make("i");
    bar.style.width = `${Math.min(100, (100 * Math.abs(value)) / Math.abs(most))}%`;
    return make("tr", { className: value < 0 ? "less" : "" },
      make("td", {}, ...writer(sources[i])), make("td", {}, ...writer(sources[j])),
      make("td", { className: "number" }, make("span", { className: "track" }, bar),
        format(value, true)));
  };
  const shown = pairs.slice(0, SHOWN).filter(([, , value]) => value);
  const rest = total - shown.reduce((sum, [, , value]) => sum + value, 0);
  const head = ["query, written by", "key, written by", "part of the score"].map((textContent) =>
    make("th", { scope: "col", textContent }));
  const last = (text, value) => make("tr", {}, make("th", { scope: "row", colSpan: 2, textContent: text }),
    make("td", { className: "number", textContent: format(value, true) }));
  return [make("p", {}, ...said), make("table", {}, make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...shown.map(cells), last("all other pairs", rest),
      last("score, above the mean of the row", total)))];
}
