/* What the page shows in one sentence, and the legend of the names of heads, which is also a filter. */

import { $, make, sentence } from "./dom.js";
import { run, state, textName, update } from "./state.js";
import { defineColours, fillTag, kindOf, shownName } from "./names.js";
import { clearestView } from "./finding.js";

export function buildLegend() {
  defineColours(run);
  for (const { key, letter, title, meaning } of run.names.filter((name) => name.letter)) {
    const tag = make("span");
    fillTag(tag, { key, letter });
    const button = make("button", { className: "quiet", title: `${meaning}\nClick: only these heads.` },
      tag, make("span", { textContent: title }));
    button.dataset.name = key;
    button.addEventListener("click", () => chooseName(key));
    $("names").append(button);
  }
  const outlined = make("span", { className: "tag hollow", textContent: "A" });
  $("names").append(make("span", { id: "hollow" }, outlined,
    ` outlined: not on ${textName()}, on prompts only`), make("span", { id: "no-names" }));
}

/** Shows only the heads of a name, and the clearest of them enlarged; again: all heads. */
const chooseName = (key) =>
  update(state.name === key ? { name: "" } : { name: key, ...clearestView(key) });

/** Updates the sentence about the model, and the legend: the number of heads of each name at the shown
 * step, also of another run. */
export function drawLegend() {
  $("subject").replaceChildren(...sentence(run.frames[state.frame].heads.subject));
  const names = Array.from({ length: run.count }, (_, index) => shownName(index));
  $("hollow").hidden = !names.some((name) => name?.hollow);
  const last = new Set(run.frames.at(-1).heads.names.map((n) => run.names[n].key));
  for (const button of $("names").querySelectorAll("button")) {
    const { name } = button.dataset;
    const count = names.filter((one) => one?.key === name).length;
    const isShown = count > 0 || state.name === name;
    // Those of the last step keep their places, so that little moves while the page plays.
    button.hidden = !last.has(name) && !isShown;
    button.style.visibility = isShown ? "" : "hidden";
    button.lastChild.textContent = `${kindOf(name).title}${count === 1 ? "" : "s"} ${count}`;
    button.setAttribute("aria-pressed", state.name === name);
  }
  $("no-names").textContent = $("names").querySelector("button:not([hidden])") ? ""
    : "No head has a name: none attends to one kind of token clearly more than by chance, " +
      `${run.windows ? `on ${textName()} or on the repeated sequence` : "on every prompt"}.`;
}
