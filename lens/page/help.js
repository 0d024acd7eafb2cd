/* The help: keys, statistics and colours. */

import { $, make } from "./dom.js";
import { run } from "./state.js";

const KEYS = [
  ["← → ↑ ↓", "the next head"],
  ["Enter", "enlarge a head"],
  ["Esc", "close the enlarged head"],
  [", .", "the previous step, the next step"],
  ["Space", "play, pause"],
  ["p", "the next prompt"],
  ["Shift ← → ↑ ↓", "the next cell of the enlarged map"],
  ["s", "colours: square root or linear"],
  ["h", "hide the first column"],
  ["d", "compare with the first step or the other run; stop comparing"],
  ["t", "light or dark"],
  ["?", "this help"],
];

export function buildHelp() {
  const list = (pairs) => make("dl", {}, ...pairs.flatMap(([term, text, id = ""]) => [
    make("dt", { id }, term), make("dd", { textContent: text })]));
  const heading = (textContent) => make("h2", { textContent });
  const text = (textContent) => make("p", { textContent });
  const close = make("button", { textContent: "close" });
  close.addEventListener("click", () => $("help").close());
  const title = make("h2", { id: "help-title", textContent: "How to read this" });
  const keys = KEYS.map(([key, does]) => [make("kbd", { textContent: key }), does]);
  $("help").append(
    make("header", {}, title, close),
    text("Each square is one attention head on one prompt. A row is a query token, a column a key " +
      "token; brighter is more weight; the weights of a row sum to one. A token cannot attend to " +
      "later tokens, so the upper right is empty. L3 H5 is head 5 of layer 3; layers, heads and " +
      "positions count from 0."),
    heading("Keys"), list(keys),
    heading("Statistics"), text("Means over all prompts on which they are defined."),
    list(run.statistics.map((of) => [of.title, of.description, `about-${of.key}`])),
    heading("Colours"),
    text("Square root: a weight of 0.04 is a fifth as bright as a weight of 1. Hiding the first " +
      "column blanks the first token, the attention sink of many heads, and rescales each head's " +
      "colours to the largest remaining weight; the weights that you read do not change. A " +
      "difference is B − A: orange where B has more weight, blue where it has less. Of two steps, " +
      "A is the earlier."),
  );
  $("help").addEventListener("click", (event) => {
    if (event.target === $("help")) $("help").close(); // outside of the box
  });
}

export function openHelp(key = null) {
  if (!$("help").open) $("help").showModal();
  $("help").scrollTop = 0;
  if (key !== null) $(`about-${key}`)?.scrollIntoView({ block: "center" });
}
