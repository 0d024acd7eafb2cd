/* The logit lens: what the output layer predicts from the input of each layer. */

import { format } from "./text.js";
import { $, make } from "./dom.js";
import { A, B, sideName } from "./state.js";
import { chance, predictionsOf, quotedToken } from "./predictions.js";

/** Shows, after the query token, the most likely token from each layer, for A and B. */
export function drawLayers(query) {
  const sides = (B?.same ? [A, B] : [A]).filter((of) => predictionsOf(of)?.layers.length);
  $("layers").hidden = !sides.length;
  if (!sides.length) return;
  $("layers").replaceChildren(make("p", { textContent: "Logit lens: the most likely next token if " +
    "the final layer norm and the output layer are applied to the input of each layer " +
    "(nostalgebraist 2020)." }), ...sides.map((of) => layerTable(of, query)));
}

function layerTable(of, query) {
  const final = predictionsOf(of);
  const [truth, texts] = [A.tokens[query + 1], of.facts.predictions.tokens];
  const columns = [["", ""], ["token", ""], ["probability", "number"],
    ["loss", "number"]].map(([textContent, className]) =>
    make("th", { scope: "col", textContent, className }));
  const rows = [...final.layers, final].map(({ losses, tokens, probabilities }, layer) => {
    const text = texts[tokens[query][0]];
    const sign = text === truth ? " ✓" : "";
    const from = layer < final.layers.length ? `input of L${layer}` : "output";
    return make("tr", { className: sign ? "true" : "" },
      make("th", { scope: "row", textContent: from }), make("td", {}, quotedToken(text), sign),
      make("td", { className: "number", textContent: chance(probabilities[query][0]) }),
      make("td", { className: "number", textContent: format(losses[query] ?? null) }));
  });
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...columns)),
    make("tbody", {}, ...rows));
  return make("div", {}, ...(B?.same ? [make("b", { textContent: sideName(of) })] : []), table);
}
