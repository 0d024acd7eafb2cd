/* The prompt as text, coloured by the weights of the enlarged head.
 *
 * The text is one node, so that letters of several tokens are joined as their script needs it. Behind
 * it is an element for each token, where the token is on the screen. */

import { formatCell, formatChange } from "./text.js";
import { $, make } from "./dom.js";
import { A, B, comparable, hovered, selected, state } from "./state.js";
import { ATTENTION, LESS, MORE, colours, height, shade } from "./colours.js";
import { scaleEnd } from "./maps.js";
import { cellOf } from "./cells.js";

// Opacity of the largest weight; the ink of each theme is readable on it.
const STRONGEST = { light: 0.85, dark: 0.48 };
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/;

let textTokens = null; // the tokens that are shown as text
let places = []; // of each token: its first character in the text, and the one after its last

function writeTokens() {
  textTokens = A.tokens;
  // In running text, "l" and "I" are hard to tell apart.
  $("text").classList.toggle("mono", A.tokens.slice(1).every((token) => [...token].length === 1));
  const { period, signs } = A.run.prompts[A.prompt];
  $("signs").textContent = signs;
  let text = "";
  places = A.texts.map((token, n) => {
    const first = text.length;
    text += token.replaceAll("⏎", "⏎\n");
    const end = text.length;
    if (period && (n === 0 || n === period)) text += "\n"; // each copy has its own lines
    return [first, end];
  });
  $("prose").textContent = text;
  $("tokens").replaceChildren(...places.map((_, n) => {
    const node = make("i");
    node.dataset.token = n;
    if (period && (n === 1 || n === period + 1)) node.dataset.copy = `copy ${n === 1 ? 1 : 2}`;
    return node;
  }));
  placeTokens();
}

/** Returns where each token is on the screen: its lines, the longest first. */
function boxesOfTokens() {
  const range = document.createRange();
  const text = $("prose").firstChild;
  return places.map(([first, end]) => {
    if (!text) return [];
    range.setStart(text, first);
    range.setEnd(text, end);
    return [...range.getClientRects()].filter(({ width }) => width > 0.5)
      .sort((a, b) => b.width - a.width);
  });
}

/** Returns whether a token is drawn in the place of the token before, as a part of its character. */
const isWithin = ([box], [other]) => !box || (other && Math.abs(box.top - other.top) < 2 &&
  Math.min(box.right, other.right) - Math.max(box.left, other.left) > box.width / 2);

/** Puts the elements of the tokens behind their text. Tokens of one character have equal parts of it. */
export function placeTokens() {
  const origin = $("tokens").getBoundingClientRect();
  const boxes = boxesOfTokens();
  const put = (node, { left, top, width, height: tall }, from) => Object.assign(node.style, {
    left: `${left - from.left}px`, top: `${top - from.top}px`, width: `${width}px`,
    height: `${tall}px` });
  for (let n = 0, next; n < boxes.length; n = next) {
    for (next = n + 1; next < boxes.length && isWithin(boxes[next], boxes[n]);) next++;
    const [box, ...more] = boxes[n];
    if (!box) continue;
    const width = box.width / (next - n);
    const isBack = RIGHT_TO_LEFT.test(A.texts[n]);
    for (let token = n; token < next; token++) {
      const left = box.left + width * (isBack ? next - 1 - token : token - n);
      put($("tokens").children[token], { left, top: box.top, width, height: box.height }, origin);
    }
    // Of a token on several lines, the other lines.
    $("tokens").children[n].replaceChildren(...more.map((line) => {
      const node = make("i");
      put(node, line, box);
      return node;
    }));
  }
  document.documentElement.style.setProperty("--text", `${$("text").offsetWidth}px`);
}

/** Writes the characters after the query token in a paler colour, if the browser can. */
function markAfter(query) {
  if (!globalThis.CSS?.highlights) return;
  const range = document.createRange();
  range.selectNodeContents($("prose"));
  range.setStart($("prose").firstChild, places[query][1]);
  CSS.highlights.set("after", new Highlight(range));
}

/** Scrolls a long text to a token. */
function scrollToToken(node) {
  const text = $("text");
  if (text.scrollHeight <= text.clientHeight + 1 || hovered.query !== null) return;
  const { offsetTop: top, offsetHeight: tall } = node;
  if (top < text.scrollTop || top + tall > text.scrollTop + text.clientHeight) {
    text.scrollTop = top - text.clientHeight / 2;
  }
}

/** Draws the prompt as text, with the weights of a query token of the enlarged head. */
export function drawText(query) {
  if (textTokens !== A.tokens) writeTokens();
  const index = selected();
  const what = comparable(index) ? state.show : "a";
  const most = scaleEnd(index, what);
  const strongest = STRONGEST[colours.isDark ? "dark" : "light"];
  const nodes = [...$("tokens").children];
  nodes.forEach((node, key) => {
    node.className = key === query ? "query" : "";
    node.title = `${A.labels[key]}\nposition ${key}`;
    node.style.backgroundColor = "";
    if (key > query) return;
    const one = cellOf(what === "b" ? B : A, index, query, key);
    const two = what === "difference" ? cellOf(B, index, query, key) : null;
    const value = two === null ? one.value : two.value - one.value;
    node.title += two === null ? `, ${A.valued ? "weight × norm" : "weight"} ${formatCell(one)}`
      : `, B − A ${formatChange(one, two)}`;
    const colour = two === null ? ATTENTION : value < 0 ? LESS : MORE;
    shade(node, colour, strongest * height(Math.abs(value), most));
  });
  markAfter(query);
  scrollToToken(nodes[query]);
}
