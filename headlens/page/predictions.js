/* What the model predicts after the query token: the most likely next tokens. */

import { format, formatLoss } from "./text.js";
import { $, bold, make, quotedToken } from "./dom.js";
import { A, B, sideName } from "./state.js";
import { wasText } from "./typing.js";

const predictionsOf = (of) => of?.facts.predictions?.of_prompts[of.prompt] ?? null;

/** Shows the true next token and the most likely tokens after the query token, for A and B. */
export function drawNextToken(query) {
  const sides = (B?.same ? [A, B] : [A]).filter(predictionsOf);
  $("next").hidden = !sides.length;
  $("next").replaceChildren(...sides.map((of) => nextToken(of, query)));
}

const chance = (p) => format(p, false, "chance");

/** Returns a row of a list of predicted tokens. isTrue: it is the next token of the prompt. was: its
 * probability with all heads, as text. */
function predictionRow(label, p, isTrue, was = "") {
  const bar = make("i");
  bar.style.width = `${100 * p}%`;
  const sign = isTrue ? { title: "the next token of the prompt", textContent: "✓" } : {};
  return make("li", { className: isTrue ? "true" : "" }, quotedToken(label),
    make("span", { className: "track" }, bar),
    make("span", { className: "number", textContent: chance(p) }),
    ...(was ? [make("small", { textContent: was, title: "with all heads" })] : []),
    make("span", { className: "sign", ...sign }));
}

function nextToken(of, query) {
  const { losses, tokens, probabilities, hits } = predictionsOf(of);
  const [label, loss, hit] = [A.labels[query + 1], losses[query] ?? null, hits[query]];
  const { predictions, whole } = of.facts;
  const rows = tokens[query].map((token, n) => predictionRow(
    n === hit ? label : predictions.labels[token], // that of the prompt has the whole character
    probabilities[query][n], n === hit, whole && wasText(whole, query, predictions.ids[token], chance)));
  if (label !== undefined && loss !== null && hit < 0) {
    rows.push(predictionRow(label, Math.exp(-loss), true));
    rows.at(-1).classList.add("more");
  }
  const next = label === undefined ? ["the next token is not shown"]
    : ["next token ", quotedToken(label)];
  const about = label === undefined && loss === null ? ["the prompt ends here"]
    : [...next, ", loss ", bold(formatLoss(loss)), " nats"];
  const name = B?.same ? [bold(sideName(of)), " · "] : [];
  return make("div", {}, make("p", {}, ...name, "after ", quotedToken(A.labels[query]),
    ` (${query}): `, ...about), make("ol", {}, ...rows));
}
