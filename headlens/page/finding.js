/* What the page says about the enlarged head, and the rows where heads are clear: all of it is decided in
 * headlens/finding.py. */

import { $, make, sentence, showMessage } from "./dom.js";
import { here, placeOfHead, run, selected, selectedQuery, state, update } from "./state.js";
import { nameAt, setColour, statusOf } from "./names.js";

/** Returns what a frame says about its heads, {findings, rows, prompts, clearest}. */
const factsOf = (frame) => run.frames[frame].facts.heads;

/** Returns the view of the head with which the page opens. */
export const openingView = () =>
  (run.opening ? { frame: run.frames.length - 1, ...run.opening } : {});

/** Returns the view of the clearest head of a name at the shown step, {} without one. On the shown prompt,
 * unless its name is undefined there or clearest on another kind of prompt: text or repeated sequence. */
export function clearestView(key) {
  const [index, clearest] = factsOf(state.frame).clearest[key] ?? [];
  if (index === undefined) return {};
  const isSameKind = !run.prompts[clearest].period === !run.prompts[state.prompt].period;
  const prompt = isSameKind && sharpestQuery(index) !== null ? state.prompt : clearest;
  if (prompt !== state.prompt) {
    showMessage(`Prompt ${prompt + 1} is now shown: there this head does what its name says.`);
  }
  return { ...placeOfHead(index), prompt, query: sharpestQuery(index, prompt) };
}

/** Returns the query token of a prompt at which the name of a head is clearest, or null. */
export function sharpestQuery(index, prompt = state.prompt) {
  const query = factsOf(state.frame).rows[prompt][index];
  return query < 0 ? null : query;
}

/** Shows a prompt, on the row where the name of the enlarged head is clearest. */
export function choosePrompt(prompt) {
  update({ prompt, query: selected() === null ? null : sharpestQuery(selected(), prompt) });
}

/** Shows what the enlarged head does at the shown step, with a button to the row of the example. */
export function drawFinding() {
  const index = selected();
  const name = index === null ? null : nameAt(here, index);
  $("detail-name").replaceChildren(...(name ? [`· ${name.title} `,
    make("small", { textContent: name.where })] : []));
  $("detail-name").className = name ? `kind-${name.key}` : "";
  setColour($("detail-name"), name?.key);
  if (index === null) return;
  const { findings, prompts } = factsOf(state.frame);
  const parts = [statusOf(here, index), " ", ...sentence(findings[index])];
  const prompt = prompts[index];
  const query = prompt < 0 ? null : sharpestQuery(index, prompt);
  if (query !== null && (prompt !== state.prompt || query !== selectedQuery())) {
    const button = make("button", { textContent: "show the example" });
    button.addEventListener("click", () => update({ prompt, query }));
    parts.push(" ", button);
  }
  $("finding").replaceChildren(...parts);
}
