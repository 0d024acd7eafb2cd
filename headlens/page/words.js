/* The prompt as text, coloured by the weights of the enlarged head. */

import { explainSigns, formatCell, formatChange, label, visible } from "./text.js";
import { $, make } from "./dom.js";
import { A, B, comparable, enlarged, state } from "./state.js";
import { ATTENTION, LESS, MORE, height, shade } from "./colours.js";
import { firstKey, scaleEnd } from "./maps.js";
import { cellOf } from "./cells.js";

const STRONGEST = 0.85; // alpha of the largest weight

let textTokens = null; // the tokens that are shown as text

function writeTokens() {
  textTokens = A.tokens;
  // In running text, "l" and "I" are hard to tell apart.
  $("text").classList.toggle("mono", A.tokens.slice(1).every((token) => [...token].length === 1));
  const { period } = A.run.prompts[A.prompt];
  $("signs").textContent = explainSigns(A.tokens, A.labels);
  $("text").replaceChildren(...A.texts.map(({ text }, n) => {
    const shown = text.trim() ? visible(text) : text && label(text);
    const ends = period && (n === 0 || n === period); // each copy has its own lines
    const span = make("span", { textContent: shown.replaceAll("⏎", "⏎\n") + (ends ? "\n" : "") });
    span.dataset.token = n;
    if (period && (n === 1 || n === period + 1)) span.dataset.copy = `copy ${n === 1 ? 1 : 2}`;
    return span;
  }));
}

/** Draws the prompt as text, with the weights of a query token of the enlarged head. */
export function drawText(query) {
  if (textTokens !== A.tokens) writeTokens();
  const index = enlarged();
  const what = comparable(index) ? state.show : "a";
  const most = scaleEnd(index, what);
  [...$("text").children].forEach((span, key) => {
    span.className = key > query ? "after" : key === query ? "query" : "";
    span.title = `${A.labels[key].slice(0, 400)}\nposition ${key}`;
    span.style.color = span.style.backgroundColor = "";
    if (key > query) return;
    const one = cellOf(what === "b" ? B : A, index, query, key);
    const two = what === "difference" ? cellOf(B, index, query, key) : null;
    const value = two === null ? one.value : two.value - one.value;
    span.title += two === null ? `, ${A.valued ? "weight × norm" : "weight"} ${formatCell(one)}`
      : `, B − A ${formatChange(one, two)}`;
    if (key < firstKey()) return;
    const colour = two === null ? ATTENTION : value < 0 ? LESS : MORE;
    shade(span, colour, STRONGEST * height(Math.abs(value), most));
  });
}
