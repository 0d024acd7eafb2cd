/* The prompt as text, coloured by the weights of the enlarged head or by the loss of each token. */

import {
  explainSigns, formatCell, formatChange, formatLoss, label, visible,
} from "./text.js";
import { $, checkRadio, make } from "./dom.js";
import { A, B, comparable, enlarged, selected, state } from "./state.js";
import { ATTENTION, LESS, MORE, colours, height, shade } from "./colours.js";
import { firstKey, scaleEnd } from "./maps.js";
import { cellOf } from "./cells.js";
import { predictionsOf } from "./predictions.js";

const LOSS = [222, 60, 130]; // colour of a large loss
const STRONGEST = 0.85; // alpha of the largest weight or loss

/** Returns what colours the text. Without an enlarged head, this is the loss. */
function textShows() {
  if (!predictionsOf(A)) return "attention";
  return selected() === null ? "loss" : state.text;
}

/** Returns the loss at the end of the colour scale: the largest at the first known step. It is the
 * same at all steps, and larger losses of some tokens at later steps do not make others pale. */
function largestLoss() {
  const first = [A, B].filter(predictionsOf)
    .flatMap((of) => of.run.losses[0]?.[of.prompt] ?? predictionsOf(of).losses);
  return first.reduce((most, loss) => Math.max(most, loss), 0) || 1;
}

/** Returns which losses colour the text: "a", "b" or "difference". */
const lossesShown = () => (B?.same && predictionsOf(B) ? state.show : "a");

/** Moves the text to the enlarged head or, without one, to its own section. */
function placeWords() {
  const alone = selected() === null;
  if (alone === ($("words").parentNode === $("alone"))) return;
  if (alone) $("alone").append($("words"));
  else $("readout").after($("words"));
}

/** Updates the place and the controls of the text. */
export function drawTextTools() {
  placeWords();
  const [found, kind] = [predictionsOf(A), textShows()];
  $("words").hidden = selected() === null && !found;
  $("colour-by").hidden = !found;
  checkRadio("colour-by", kind);
  $("colour-by").querySelector("[value='attention']").disabled = selected() === null;
  $("arcs").parentNode.hidden = selected() === null;
  $("loss-scale").hidden = kind !== "loss";
  if (kind !== "loss") return;
  const signed = lossesShown() === "difference";
  const end = (colour) => `rgb(${colour.join(" ")} / ${STRONGEST})`;
  const bar = make("i");
  bar.style.backgroundImage = "linear-gradient(to right, " +
    `${signed ? `${end(LESS)}, ${colours.page}, ${end(MORE)}` : `${colours.page}, ${end(LOSS)}`})`;
  const most = largestLoss().toFixed(1);
  $("loss-scale").replaceChildren(signed ? `B − A −${most}` : "0", bar,
    signed ? `+${most} nats` : `${most} nats or more`);
}

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

/** Draws the prompt as text for a query token. */
export function drawText(query) {
  if (textTokens !== A.tokens) writeTokens();
  const of = textShows() === "loss" ? lossOfToken(query)
    : enlarged() !== null && weightOfToken(query, enlarged());
  if (!of) return; // the text is hidden
  [...$("text").children].forEach((span, n) => {
    const { className, about, colour, alpha } = of(n);
    const title = `${A.labels[n].slice(0, 400)}\nposition ${n}${about}`;
    Object.assign(span, { className, title });
    span.style.color = span.style.backgroundColor = "";
    shade(span, colour, STRONGEST * alpha);
  });
}

/** Returns a function of the position of a token: {className, about, colour, alpha: 0 to 1} for its
 * weight. */
function weightOfToken(query, index) {
  const what = comparable(index) ? state.show : "a";
  const most = scaleEnd(index, what);
  return (key) => {
    if (key > query) return { className: "after", about: "", alpha: 0 };
    const one = cellOf(what === "b" ? B : A, index, query, key);
    const two = what === "difference" ? cellOf(B, index, query, key) : null;
    const value = two === null ? one.value : two.value - one.value;
    return {
      className: key === query ? "query" : "",
      about: two === null ? `, ${A.valued ? "weight × norm" : "weight"} ${formatCell(one)}`
        : `, B − A ${formatChange(one, two)}`,
      colour: two === null ? ATTENTION : value < 0 ? LESS : MORE,
      alpha: key < firstKey() ? 0 : height(Math.abs(value), most),
    };
  };
}

/** Returns the same function for the loss with which a token was predicted. */
function lossOfToken(query) {
  const [a, b] = [A, B].map((of) => predictionsOf(of)?.losses);
  const [what, most] = [lossesShown(), largestLoss()];
  return (n) => {
    const [one, two] = [a, b].map((losses) => losses?.[n - 1] ?? null);
    const signed = what === "difference" && one !== null && two !== null;
    const loss = signed ? two - one : what === "b" ? two : one;
    return {
      className: n === query ? "query" : n === query + 1 ? "next" : "",
      about: n ? `, ${signed ? "B − A of the loss" : "loss"} ${formatLoss(loss, signed)} nats`
        : ", no loss: there is no token before it",
      colour: signed ? (loss < 0 ? LESS : MORE) : LOSS,
      alpha: Math.min(1, Math.abs(loss) / most),
    };
  };
}
