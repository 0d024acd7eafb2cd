/* What the model predicts: the prompt coloured by loss, and the most likely next tokens. */

import { format, label, visible } from "./text.js";
import { $, make } from "./dom.js";
import { A, B, selected, sideName, state } from "./state.js";
import { LESS, MORE, colours, shade } from "./colours.js";

const LOSS = [222, 60, 130]; // colour of a large loss
const STRONGEST = 0.85; // alpha of the largest loss
let largest = 1; // loss at the end of the colour scale

export const predictionsOf = (of) => of?.facts.predictions?.of_prompts[of.prompt] ?? null;

/** Returns what colours the text. Without an enlarged head, this is the loss. */
function textShows() {
  if (!predictionsOf(A)) return "attention";
  return selected() === null ? "loss" : state.text;
}

/** Returns the largest loss on the shown prompt at all steps, so that all steps have one scale. */
function largestLoss() {
  const all = [A, B].filter(predictionsOf).flatMap((of) =>
    [...of.run.losses.map((at) => at[of.prompt] ?? []), predictionsOf(of).losses]);
  return all.flat().reduce((most, loss) => Math.max(most, loss), 0) || 1;
}

/** Returns which losses colour the text: "a", "b" or "difference". */
const lossesShown = () => (B?.same && predictionsOf(B) ? state.show : "a");

/** Updates the controls of the text. Call it before the text is drawn. */
export function showTextTools() {
  const [found, kind] = [predictionsOf(A), textShows()];
  $("words").hidden = selected() === null && !found;
  $("colour-by").hidden = !found;
  for (const input of $("colour-by").querySelectorAll("input")) {
    input.checked = input.value === kind;
    input.disabled = input.value === "attention" && selected() === null;
  }
  $("arcs").checked = state.arcs;
  $("arcs").parentNode.hidden = selected() === null;
  $("loss-scale").hidden = kind !== "loss";
  if (kind !== "loss") return;
  largest = largestLoss();
  const signed = lossesShown() === "difference";
  const end = (colour) => `rgb(${colour.join(" ")} / ${STRONGEST})`;
  const bar = make("i");
  bar.style.backgroundImage = "linear-gradient(to right, " +
    `${signed ? `${end(LESS)}, ${colours.page}, ${end(MORE)}` : `${colours.page}, ${end(LOSS)}`})`;
  const most = largest.toFixed(1);
  $("loss-scale").replaceChildren(signed ? `B − A −${most}` : "0", bar,
    `${signed ? "+" : ""}${most} nats`);
}

/** Colours each token by the loss of its prediction. Returns false if the text shows attention. */
export function shadeByLoss(spans, query) {
  if (textShows() !== "loss") return false;
  const [a, b] = [A, B].map((of) => predictionsOf(of)?.losses);
  const what = lossesShown();
  [...spans].forEach((span, n) => {
    span.className = n === query ? "query" : n === query + 1 ? "next" : "";
    span.title = span.style.color = span.style.backgroundColor = "";
    const [one, two] = [a, b].map((losses) => losses?.[n - 1] ?? null);
    const signed = what === "difference" && one !== null && two !== null;
    const loss = signed ? two - one : what === "b" ? two : one;
    const value = n ? `${signed ? "B − A of the loss" : "loss"} ${format(loss, signed)} nats`
      : "no loss: there is no token before it";
    span.title = `${A.tokens[n].slice(0, 400)}\nposition ${n}, ${value}`;
    const colour = signed ? (loss < 0 ? LESS : MORE) : LOSS;
    shade(span, colour, (STRONGEST * Math.abs(loss)) / largest);
  });
  return true;
}

export const chance = (p) => (p < 0.001 ? "<0.001" : String(+p.toPrecision(2)));

/** Shows the true next token and the most likely tokens after the query token, for A and B. */
export function drawNextToken(query) {
  const sides = (B?.same ? [A, B] : [A]).filter(predictionsOf);
  $("next").hidden = !sides.length;
  $("next").replaceChildren(...sides.map((of) => nextToken(of, query)));
}

/** Returns a token in quotes with visible white space. */
export const quotedToken = (text) =>
  make("bdi", { textContent: `"${label(text, 24)}"`, title: visible(text) });

/** Returns a row of a list of predicted tokens. isTrue: it is the next token of the prompt. */
function predictionRow(text, p, isTrue) {
  const bar = make("i");
  bar.style.width = `${100 * p}%`;
  const sign = isTrue ? { title: "the next token of the prompt", textContent: "✓" } : {};
  return make("li", { className: isTrue ? "true" : "" }, quotedToken(text),
    make("span", { className: "track" }, bar), make("span", { className: "number" }, chance(p)),
    make("span", { className: "sign", ...sign }));
}

function nextToken(of, query) {
  const { losses, tokens, probabilities } = predictionsOf(of);
  const texts = tokens[query].map((token) => of.facts.predictions.tokens[token]);
  const [token, loss] = [A.tokens[query + 1], losses[query] ?? null];
  const rows = texts.map((text, n) => predictionRow(text, probabilities[query][n], text === token));
  if (token !== undefined && loss !== null && !texts.includes(token)) {
    rows.push(predictionRow(token, Math.exp(-loss), true));
    rows.at(-1).classList.add("more");
  }
  const about = loss === null ? ["the prompt ends here"]
    : ["next token ", ...(token === undefined ? [] : [quotedToken(token)]),
      ", loss ", make("b", { textContent: format(loss) }), " nats"];
  const name = B?.same ? [make("b", { textContent: sideName(of) }), " · "] : [];
  return make("div", {}, make("p", {}, ...name, "after ", quotedToken(A.tokens[query]),
    ` (${query}): `, ...about), make("ol", {}, ...rows));
}
